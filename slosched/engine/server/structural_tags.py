"""Structural tags: free text in which JSON follows where a tag begins, in vLLM's two forms.

The older form is {"structures": [{"begin": …, "schema": …, "end": …}], "triggers": […]}: once the
answer has written a trigger, it goes on with one of the `begin` that start with it, then with an
instance of the schema, then with `end`.  The newer one has a `format`; of its types the one that
says the same is taken, `triggered_tags`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from slosched.engine.server.errors import ApiError
from slosched.engine.server.fields import check_fields
from slosched.engine.server.values import Body, flag, shown, strings, wrong

_OLDER_FIELDS = frozenset({"type", "structures", "triggers"})
_NEWER_FIELDS = frozenset({"type", "format"})
_STRUCTURE_FIELDS = frozenset({"begin", "schema", "end"})
_TRIGGERED_FIELDS = frozenset({"type", "triggers", "tags", "at_least_one", "stop_after_first"})
_TAG_FIELDS = frozenset({"type", "begin", "content", "end"})
_CONTENT_FIELDS = frozenset({"type", "json_schema"})
_MAX_TRIGGERS = 64
_MAX_TRIGGER_CHARS = 256


def parse_structural_tags(value: Body, where: str) -> str:
    """Return the tags as the text of a `Definition`; raise ApiError (400) for a wrong value.

    `where` is the path of `value` in the body, for messages.
    """
    if value.get("format") is not None:
        return _parse_format(value, where)
    check_fields(value, _OLDER_FIELDS, f"{where}.")
    triggers = _triggers(value, where)
    return _as_text(triggers, _objects(value, "structures", where), f"{where}.structures")


def _parse_format(value: Body, where: str) -> str:
    """Return the tags of the newer form."""
    check_fields(value, _NEWER_FIELDS, f"{where}.")
    where = f"{where}.format"
    tags = value["format"]
    kind = tags.get("type") if isinstance(tags, dict) else tags
    if not isinstance(tags, dict) or kind != "triggered_tags":
        raise ApiError(
            400,
            f"{where} must be of type 'triggered_tags', not {shown(kind)}: give {where}.triggers "
            f"and {where}.tags, or ask for a whole answer in JSON with response_format of type "
            "'json_schema', and for any other with structured_outputs.regex or .grammar",
            param=where,
        )
    check_fields(tags, _TRIGGERED_FIELDS, f"{where}.")
    if flag(tags, "at_least_one"):
        message = f"{where}.at_least_one=true is not supported: leave it out"
        raise ApiError(400, message, param=f"{where}.at_least_one")
    stops = flag(tags, "stop_after_first")
    triggers = _triggers(tags, where)
    structures = [_structure(tag, f"{where}.tags") for tag in _objects(tags, "tags", where)]
    return _as_text(triggers, structures, f"{where}.tags", stops_after_first=stops)


def _structure(tag: object, where: str) -> Body:
    """Return a tag of the newer form as a structure of the older one."""
    if not isinstance(tag, dict):
        raise wrong(where, tag, "a list of objects")
    check_fields(tag, _TAG_FIELDS, f"{where}.")
    content = tag.get("content")
    if not isinstance(content, dict) or content.get("type") != "json_schema":
        raise wrong(f"{where}.content", content, "an object of type 'json_schema'")
    check_fields(content, _CONTENT_FIELDS, f"{where}.content.")
    schema = content.get("json_schema")
    return {"begin": tag.get("begin"), "schema": schema, "end": tag.get("end")}


def _triggers(value: Body, where: str) -> Sequence[str]:
    triggers = strings(value, "triggers", _MAX_TRIGGERS, _MAX_TRIGGER_CHARS)
    if not triggers:
        raise wrong(f"{where}.triggers", value.get("triggers"), "a list of strings")
    return triggers


def _objects(value: Body, name: str, where: str) -> list[object]:
    objects = value.get(name)
    if not isinstance(objects, list) or not objects:
        raise wrong(f"{where}.{name}", objects, "a list of objects, at least one")
    return objects


def _as_text(
    triggers: Sequence[str],
    structures: Sequence[object],
    where: str,
    *,
    stops_after_first: bool = False,
) -> str:
    tags = [_tag(structure, triggers, where) for structure in structures]
    try:
        return json.dumps({"tags": tags, "stops_after_first": stops_after_first})
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
