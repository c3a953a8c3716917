"""The functions that an answer is to call, and the grammar that makes it call them.

As in vLLM, a named function's arguments are the whole answer, and `required` makes the answer a
list of calls.  With `auto` the model writes what it likes, but where it begins a call, in the form
of its chat template (`call_form`), the rest of that call follows the grammar.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slosched.engine.server.call_form import OPENING, CallForm
from slosched.engine.server.errors import ApiError
from slosched.engine.server.fields import FUNCTION_FIELDS, TOOL_FIELDS, check_fields
from slosched.engine.server.values import Body, flag, mapping, shown, wrong

_MAX_TOOLS = 128
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
"""OpenAI's rule for the names of functions."""
_NOTHING: Body = {"type": "object", "properties": {}, "additionalProperties": False}
"""The schema of a function without parameters."""


@dataclass(frozen=True)
class Tools:
    """The functions of a body whose answer has to call some of them, or may."""

    functions: Sequence[Body]
    """The tools as the client wrote them, for the chat template."""
    named: str | None
    """The one function to call, once; None if the answer chooses."""
    schemas: Mapping[str, Body]
    """The JSON schema of each function's arguments, by its name."""
    is_optional: bool
    """Whether the answer may also be text, or have text beside its calls."""
    is_parallel: bool
    """Whether there may be several calls."""

    def schema(self) -> Body:
        """Return the JSON schema of an answer that is nothing but calls."""
        if self.named is not None:
            return self.schemas[self.named]
        return _list_of_calls(self.schemas, is_parallel=self.is_parallel)

    def tags(self, form: CallForm) -> Body:
        """Return the structural tags of an answer that may call functions in this form."""
        tags = [
            {"trigger": OPENING, "begin": form.begin(name), "schema": schema, "end": form.end}
            for name, schema in self.schemas.items()
        ]
        return {"tags": tags, "stops_after_first": not self.is_parallel}


def parse_tools(body: Body) -> Tools | None:
    """Return the functions that may be called, or None; raise ApiError (400) for what is wrong."""
    tools, choice = body.get("tools"), body.get("tool_choice")
    is_parallel = flag(body, "parallel_tool_calls", default=True)
    if not tools:
        if isinstance(choice, Mapping) or choice == "required":
            raise ApiError(400, f"tool_choice={shown(choice)} needs tools", param="tool_choice")
        _check_choice(choice)
        return None
    if not isinstance(tools, list) or len(tools) > _MAX_TOOLS:
        raise wrong("tools", tools, f"a list of at most {_MAX_TOOLS} functions")
    _check_depth(tools)
    schemas = dict(_function(f"tools[{i}]", tool) for i, tool in enumerate(tools))
    if len(schemas) < len(tools):
        raise ApiError(400, "two of the tools have the same name", param="tools")
    named = _check_choice(choice)
    if choice == "none":
        return None
    if flag(body, "use_beam_search"):
        raise ApiError(400, "tools are not possible with use_beam_search", param="tools")
    if named is not None and named not in schemas:
        raise wrong("tool_choice", choice, f"one of the tools {', '.join(schemas)}")
    return Tools(tools, named, schemas, choice in (None, "auto"), is_parallel)


def _check_depth(tools: list[object]) -> None:
    """Raise ApiError (400) for tools that neither a template nor a grammar could write."""
    try:
        json.dumps(tools)
    except RecursionError:
        raise ApiError(400, "tools are nested too deeply", param="tools") from None


def _check_choice(choice: object) -> str | None:
    """Return the name of a function that is to be called; raise ApiError for a wrong choice."""
    if choice in (None, "none", "auto", "required"):
        return None
    if isinstance(choice, Mapping) and choice.get("type") == "function":
        name = mapping(choice, "function").get("name")
        if isinstance(name, str):
            return name
    expected = '\'auto\', \'none\', \'required\' or {"type": "function", "function": {"name": …}}'
    raise wrong("tool_choice", choice, expected)


def _function(where: str, tool: object) -> tuple[str, Body]:
    """Return the name of a function and the schema of its arguments."""
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        raise wrong(where, tool, 'an object {"type": "function", "function": {…}}')
    check_fields(tool, TOOL_FIELDS, f"{where}.")
    return parse_function(f"{where}.function", mapping(tool, "function"))


def parse_function(where: str, function: Body) -> tuple[str, Body]:
    """Return the name of a function and the schema of its arguments.

    Raises ApiError (400), with `where` before the name of a field that is wrong.
    """
    check_fields(function, FUNCTION_FIELDS, f"{where}.")
    name, schema = function.get("name"), mapping(function, "parameters") or _NOTHING
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise wrong(f"{where}.name", name, "1 to 64 letters, digits, underscores and dashes")
    if schema.get("type", "object") != "object":
        raise wrong(f"{where}.parameters", schema, "the JSON schema of an object")
    return name, {**schema, "type": "object"}


def _list_of_calls(schemas: Mapping[str, Body], *, is_parallel: bool) -> Body:
    """Return the schema of a list of objects with a function's name and its parameters."""
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"type": "string", "enum": [name]},
                "parameters": {"$ref": f"#/$defs/{name}"},
            },
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for name in schemas
    ]
    return {
        "type": "array",
        "minItems": 1,
        **({} if is_parallel else {"maxItems": 1}),
        "items": {"anyOf": calls},
        "$defs": {name: _below(schema, f"#/$defs/{name}") for name, schema in schemas.items()},
    }


def _below(schema: object, place: str) -> object:
    """Return a schema whose references to its own root lead to `place` instead.

    A schema with an `$id` of its own is the root of its references wherever it stands.
    """
    if isinstance(schema, list):
        return [_below(each, place) for each in schema]
    if not isinstance(schema, Mapping) or isinstance(schema.get("$id"), str):
        return schema
    return {
        name: f"{place}{value[1:]}"
        if name == "$ref" and isinstance(value, str) and value.startswith("#")
        else _below(value, place)
        for name, value in schema.items()
    }
