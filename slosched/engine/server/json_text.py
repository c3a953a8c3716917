"""JSON that clients send: parsed as a whole, and text throughout."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

_PERHAPS_HALF = re.compile(r"\\u[dD][89a-fA-F]")
"""How JSON spells half of a surrogate pair; two halves in a row are a character."""


class NotTextError(ValueError):
    """A string has half of a surrogate pair, which is no character and cannot be sent or stored."""

    def __init__(self, field: str | None) -> None:
        """`field` is the field of the outermost object in which the string is, if that is known."""
        super().__init__("half of a surrogate pair stands for no character")
        self.field = field


def parse_json(content: bytes | bytearray | str) -> object:
    """Return the value of a JSON text.

    Raises ValueError if it is none, NotTextError if a string in it cannot be text, and
    RecursionError if it is nested too deeply.
    """
    text = content if isinstance(content, str) else content.decode("utf-8-sig")
    value: object = json.loads(text, parse_constant=_refuse_constant)
    if _PERHAPS_HALF.search(text) and not _is_text(value):
        fields: Iterable[tuple[str, object]] = value.items() if isinstance(value, dict) else ()
        wrong = [name for name, inner in fields if _is_text(name) and not _is_text(inner)]
        raise NotTextError(wrong[0] if wrong else None)
    return value


def _is_text(value: object) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
