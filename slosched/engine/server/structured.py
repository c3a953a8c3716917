"""The grammar that a body asks for, in the fields of OpenAI and of vLLM.

`response_format` is OpenAI's.  `structured_outputs` is vLLM's, and the fields `guided_…` are those
that vLLM had before.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import NamedTuple

from slosched.engine.grammar import Definition, Kind
from slosched.engine.server.call_form import CallForm
from slosched.engine.server.errors import ApiError
from slosched.engine.server.fields import (
    JSON_SCHEMA_FIELDS,
    RESPONSE_FORMAT_FIELDS,
    STRUCTURED_FIELDS,
    STRUCTURED_OUTPUT_FIELDS,
    check_fields,
)
from slosched.engine.server.structural_tags import parse_structural_tags
from slosched.engine.server.tools import Tools
from slosched.engine.server.values import Body, flag, mapping, wrong

_ANY_OBJECT: Body = {"type": "object"}


class StructuredOutput(NamedTuple):
    """A grammar that a body asks for, and the field in which it does."""

    definition: Definition
    param: str


def parse_structured_output(
    body: Body, tools: Tools | None = None, call_form: CallForm | None = None
) -> StructuredOutput | None:
    """Return the grammar, or None; raise ApiError (400) for a wrong value, or more than one.

    The grammar of an answer that calls `tools` is one of them; `call_form` is how the model writes
    calls among its text.
    """
    found = [
        *([] if tools is None else [_calls(tools, call_form)]),
        *_response_format(mapping(body, "response_format")),
        *_structured_outputs(mapping(body, "structured_outputs")),
        *_definitions(_guided(body), "guided_", has_whitespace=True),
    ]
    if len(found) > 1:
        names = " and ".join(one.param for one in found)
        raise ApiError(400, f"{names} each ask for a grammar; keep one", param=found[1].param)
    if found and flag(body, "ignore_eos"):
        raise ApiError(
            400,
            f"ignore_eos=true contradicts {found[0].param}: the answer ends where its grammar does",
            param="ignore_eos",
        )
    return found[0] if found else None


def _calls(tools: Tools, form: CallForm | None) -> StructuredOutput:
    """Return the grammar of an answer that has to call functions, or may."""
    if tools.is_optional and form is None:
        raise ApiError(
            400,
            "tool_choice='auto', which tools without tool_choice ask for, is not possible with "
            "this model: its chat template does not show it functions, or not with calls between "
            "<tool_call> and </tool_call>; send 'required', 'none', or an object that names the "
            "function to call",
            param="tool_choice",
        )
    try:
        if not tools.is_optional or form is None:
            return _json(json.dumps(tools.schema()), "tools")
        definition = Definition(Kind.STRUCTURAL_TAGS, json.dumps(tools.tags(form)))
        return StructuredOutput(definition, "tools")
    except RecursionError:
        raise ApiError(400, "tools are nested too deeply", param="tools") from None


def _response_format(response_format: Body) -> list[StructuredOutput]:
    if not response_format:
        return []
    kind = response_format.get("type")
    if kind == "structural_tag":
        tags = {name: value for name, value in response_format.items() if name != "type"}
        return [_structural_tags(tags, "response_format")]
    check_fields(response_format, RESPONSE_FORMAT_FIELDS, "response_format.")
    if kind == "text":
        return []
    if kind == "json_object":
        return [_json(_ANY_OBJECT, "response_format")]
    if kind != "json_schema":
        expected = "'text', 'json_object', 'json_schema' or 'structural_tag'"
        raise wrong("response_format.type", kind, expected)
    where = "response_format.json_schema"
    json_schema = mapping(response_format, "json_schema")
    check_fields(json_schema, JSON_SCHEMA_FIELDS, f"{where}.")
    return [_json(json_schema.get("schema"), f"{where}.schema")]


def _structured_outputs(wanted: Body) -> list[StructuredOutput]:
    where = "structured_outputs."
    check_fields(wanted, STRUCTURED_OUTPUT_FIELDS, where)
    has_whitespace = not flag(wanted, "disable_any_whitespace")
    found = _definitions(wanted, where, has_whitespace=has_whitespace)
    if flag(wanted, "json_object"):
        found.append(_json(_ANY_OBJECT, f"{where}json_object", has_whitespace=has_whitespace))
    return found


def _guided(body: Body) -> Body:
    """Return the fields `guided_…` without that prefix."""
    prefix = "guided_"
    return {
        name.removeprefix(prefix): value
        for name, value in body.items()
        if name.startswith(prefix) and name in STRUCTURED_FIELDS
    }


def _definitions(wanted: Body, prefix: str, *, has_whitespace: bool) -> list[StructuredOutput]:
    """Return what json, regex, choice and grammar ask for; `prefix` is for messages."""
    pattern = wanted.get("whitespace_pattern")
    if pattern is not None and not isinstance(pattern, str):
        raise wrong(f"{prefix}whitespace_pattern", pattern, "a string")
    found = []
    if (schema := wanted.get("json")) is not None:
        found.append(_json(schema, f"{prefix}json", pattern, has_whitespace=has_whitespace))
    if (tags := wanted.get("structural_tag")) is not None:
        where = f"{prefix}structural_tag"
        found.append(_structural_tags(tags, where, pattern, has_whitespace=has_whitespace))
    for name, read in _READERS.items():
        if (value := wanted.get(name)) is not None:
            found.append(StructuredOutput(read(value, prefix + name), prefix + name))
    return found


def _json(
    schema: object,
    param: str,
    whitespace_pattern: str | None = None,
    *,
    has_whitespace: bool = True,
) -> StructuredOutput:
    """Return the grammar of a schema, which may also be a text, as vLLM has it."""
    if not isinstance(schema, dict | bool | str):
        raise wrong(param, schema, "a JSON schema")
    text = schema
    if not isinstance(text, str):
        try:
            text = json.dumps(schema)
        except RecursionError:
            raise ApiError(400, f"{param} is nested too deeply", param=param) from None
    definition = Definition(Kind.JSON_SCHEMA, text, has_whitespace, whitespace_pattern)
    return StructuredOutput(definition, param)


def _structural_tags(
    value: object,
    param: str,
    whitespace_pattern: str | None = None,
    *,
    has_whitespace: bool = True,
) -> StructuredOutput:
    """Return the grammar of text with tags, which may also be a JSON text, as vLLM has it."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise wrong(param, value, "an object, or one in JSON") from None
    if not isinstance(value, dict):
        raise wrong(param, value, "an object, or one in JSON")
    text = parse_structural_tags(value, param)
    definition = Definition(Kind.STRUCTURAL_TAGS, text, has_whitespace, whitespace_pattern)
    return StructuredOutput(definition, param)


def _regex(value: object, param: str) -> Definition:
    return Definition(Kind.REGEX, _text(value, param))


def _grammar(value: object, param: str) -> Definition:
    return Definition(Kind.GRAMMAR, _text(value, param))


def _text(value: object, param: str) -> str:
    if not isinstance(value, str) or not value:
        raise wrong(param, value, "a string that is not empty")
    return value


def _choice(value: object, param: str) -> Definition:
    if (
        not isinstance(value, list)
        or not value
        or not all(isinstance(text, str) and text for text in value)
    ):
        raise wrong(param, value, "a list of strings, none of them empty")
    return Definition(Kind.CHOICE, json.dumps(value))


_READERS: dict[str, Callable[[object, str], Definition]] = {
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
}
