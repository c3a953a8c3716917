"""Structural tags: free text in which JSON follows where a tag begins, in vLLM's form.

The form is {"structures": [{"begin": …, "schema": …, "end": …}], "triggers": […]}: once the answer
has written a trigger, it goes on with one of the `begin` that start with it, then with an instance
of the schema, then with `end`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from slosched.engine.server.errors import ApiError
from slosched.engine.server.fields import check_fields
from slosched.engine.server.values import Body, strings, wrong

FIELDS = frozenset({"structures", "triggers"})
_STRUCTURE_FIELDS = frozenset({"begin", "schema", "end"})
_MAX_TRIGGERS = 64
_MAX_TRIGGER_CHARS = 256


def parse_structural_tags(value: Body, where: str) -> str:
    """Return the tags as the text of a `Definition`; raise ApiError (400) for a wrong value.

    `where` is the path of `value` in the body, for messages.
    """
    if value.get("format") is not None:
        raise ApiError(
            400,
            f"{where}.format is not supported: give the tags as {where}.structures, a list of "
            f"objects with begin, schema and end, and {where}.triggers, a list of strings",
            param=f"{where}.format",
        )
    check_fields(value, FIELDS, f"{where}.")
    triggers = strings(value, "triggers", _MAX_TRIGGERS, _MAX_TRIGGER_CHARS)
    if not triggers:
        raise wrong(f"{where}.triggers", value.get("triggers"), "a list of strings")
    structures = value.get("structures")
    if not isinstance(structures, list) or not structures:
        raise wrong(f"{where}.structures", structures, "a list of objects, at least one")
    tags = [_tag(structure, triggers, f"{where}.structures") for structure in structures]
    try:
        return json.dumps(tags)
    except RecursionError:
        raise ApiError(400, f"{where} is nested too deeply", param=where) from None


def _tag(structure: object, triggers: Sequence[str], where: str) -> dict[str, object]:
    """Return the trigger of a structure with its other fields."""
    if not isinstance(structure, dict):
        raise wrong(where, structure, "a list of objects")
    check_fields(structure, _STRUCTURE_FIELDS, f"{where}.")
    begin, end = structure.get("begin"), structure.get("end")
    schema = structure.get("schema")
    for name, text in (("begin", begin), ("end", end)):
        if not isinstance(text, str):
            raise wrong(f"{where}.{name}", text, "a string")
    if schema is not None and not isinstance(schema, dict):
        raise wrong(f"{where}.schema", schema, "a JSON schema")
    trigger = next((t for t in triggers if str(begin).startswith(t)), None)
    if trigger is None:
        raise wrong(f"{where}.begin", begin, f"a string that starts with one of {list(triggers)}")
    return {"trigger": trigger, "begin": begin, "schema": schema or {}, "end": end}
