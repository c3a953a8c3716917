"""The items of a JSON list, read one after the other, however long the list is."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from slosched.workload.readers.rows import BadRows, Row, RowError, short
from slosched.workload.request import TraceError

_COMMENTS = re.compile(r"(?:[ \t\r]*(?:#[^\n]*)?\n)*\s*\[")
_BETWEEN = re.compile(r"\s*(,|\])?\s*")
_BLANKS = re.compile(r"\s*")
_LONGEST_TOKEN = 16
"""Length of the longest JSON token that is neither a string nor a number.

An error closer than this to the end of the text may be due to a token that is cut in two.
"""


def json_items(path: Path, chunks: Iterator[str], bad: BadRows) -> Iterator[Row]:
    """Yield the rows of a file that is a list of objects, perhaps below `#` lines."""
    text = _Window(path, chunks)
    text.skip(_COMMENTS)
    number = 0
    while True:
        separator = text.skip(_BETWEEN)
        if separator == "]":
            text.check_end()
            return
        if (separator == ",") != (number > 0):
            text.complain("expected ',' or ']' after an item" if number else "expected an item")
        number += 1
        values = text.item(number)
        if isinstance(values, dict):
            yield Row(path, number, values, unit="item")
        else:
            what = f"expected a JSON object, not {short(values)}"
            bad.add(RowError(f"{path}, item {number}: {what}", "no object"))


class _Window:
    """The part of a text that is being parsed; text before it is dropped."""

    def __init__(self, path: Path, chunks: Iterator[str]) -> None:
        self._path = path
        self._chunks = chunks
        self._text = ""
        self._at = 0
        self._line, self._column = 1, 1  # of the first character of `_text`
        self._decoder = json.JSONDecoder()

    def skip(self, pattern: re.Pattern[str]) -> str:
        """Move behind the longest match, and return its last group, or "" without one."""
        while True:
            match = pattern.match(self._text, self._at)
            if (match and match.end() < len(self._text)) or not self._more():
                break
        if match is None:
            return ""
        self._at = match.end()
        return (match[1] or "") if pattern.groups else ""

    def item(self, number: int) -> object:
        """Parse the JSON value here and move behind it; raise TraceError if there is none."""
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                may_be_cut = error.msg.startswith("Unterminated") or (
                    error.pos > len(self._text) - _LONGEST_TOKEN
                )
                if not (may_be_cut and self._more()):
                    self._at = error.pos
                    self.complain(error.msg)
            except (ValueError, RecursionError) as error:  # numbers of thousands of digits
                raise TraceError(
                    f"{self._path}, item {number}: not JSON that can be read ({error})"
                ) from None
            else:
                # A number that ends where the text ends may continue in the next chunk.
                if end < len(self._text) or not self._more():
                    self._at = end
                    return value

    def check_end(self) -> None:
        """Raise TraceError if there is anything but blanks from here on."""
        self.skip(_BLANKS)
        if self._at < len(self._text):
            self.complain("expected nothing behind the list")

    def complain(self, problem: str) -> NoReturn:
        self._forget()
        place = f"{self._path}, line {self._line}, column {self._column}"
        raise TraceError(f"{place}: not JSON ({problem})")

    def _more(self) -> bool:
        """Load at least as much text as is still ahead, so that a long item is parsed few times.

        Returns False at the end of the file.
        """
        ahead = len(self._text) - self._at
        parts: list[str] = []
        size = 0
        for chunk in self._chunks:
            parts.append(chunk)
            size += len(chunk)
            if size > ahead:
                break
        if not size:
            return False
        self._forget()
        self._text = "".join([self._text, *parts])
        return True

    def _forget(self) -> None:
        """Drop the text before `_at`, and count its lines for error messages."""
        lines = self._text.count("\n", 0, self._at)
        since = self._at - 1 - self._text.rfind("\n", 0, self._at) if lines else self._at
        self._line += lines
        self._column = since + (1 if lines else self._column)
        self._text = self._text[self._at :]
        self._at = 0
