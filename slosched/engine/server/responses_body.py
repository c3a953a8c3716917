"""The bodies of /v1/responses, as bodies of a chat that ask for the same."""

from __future__ import annotations

from collections.abc import Mapping

from slosched.engine.server.errors import ApiError
from slosched.engine.server.fields import (
    INPUT_CALL_FIELDS,
    INPUT_FIELDS,
    INPUT_RESULT_FIELDS,
    RESPONSES_TEXT_FIELDS,
    RESPONSES_TEXT_FORMAT_FIELDS,
    check_fields,
)
from slosched.engine.server.messages import called_function
from slosched.engine.server.tools import parse_function
from slosched.engine.server.values import Body, mapping, shown, wrong

_ROLES = ("user", "assistant", "system", "developer")
_TEXT_PARTS = ("input_text", "output_text", "text")
_NOT_OF_A_CHAT = frozenset(
    {"input", "instructions", "max_output_tokens", "text", "stream_options", "include"}
)
_MAX_METADATA = 16
_LOGPROBS = "message.output_text.logprobs"
"""What `include` names to be told log-probabilities of the text's tokens."""


def as_chat(body: Body) -> Body:
    """Return a body for a chat; raise ApiError (400) for what is wrong or not supported."""
    check_fields(mapping(body, "stream_options"), frozenset(), "stream_options.")
    _check_metadata(mapping(body, "metadata"))
    chat = {name: value for name, value in body.items() if name not in _NOT_OF_A_CHAT}
    chat["messages"] = [*_instructions(body), *_messages(body.get("input"))]
    if (tools := body.get("tools")) is not None:
        chat["tools"] = _tools(tools)
    choice = body.get("tool_choice")
    if isinstance(choice, Mapping) and choice.get("type") == "function":
        chat["tool_choice"] = {"type": "function", "function": {"name": choice.get("name")}}
    if (limit := body.get("max_output_tokens")) is not None:
        if type(limit) is not int or limit < 1:
            raise wrong("max_output_tokens", limit, "an integer >= 1")
        chat["max_tokens"] = limit
    chat["logprobs"] = _includes_logprobs(body.get("include"))
    if body.get("top_logprobs") and not chat["logprobs"]:
        message = f"top_logprobs needs include=[{_LOGPROBS!r}] beside it"
        raise ApiError(400, message, param="top_logprobs")
    if (response_format := _format(mapping(body, "text"))) is not None:
        chat["response_format"] = response_format
    return chat


def _includes_logprobs(include: object) -> bool:
    """Tell whether the answer has log-probabilities; raise ApiError (400) for anything else."""
    if include in (None, []):
        return False
    if not isinstance(include, list) or set(map(str, include)) != {_LOGPROBS}:
        raise wrong("include", include, f"a list of nothing but {_LOGPROBS!r}")
    return True


def _instructions(body: Body) -> list[Body]:
    text = body.get("instructions")
    if text is None:
        return []
    if not isinstance(text, str):
        raise wrong("instructions", text, "a string")
    return [{"role": "system", "content": text}]


def _messages(value: object) -> list[Body]:
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise wrong("input", value, "a string or a list of at least one message")
    messages: list[Body] = []
    for i, item in enumerate(value):
        message = _item(f"input[{i}]", item)
        before = messages[-1].get("tool_calls") if messages else None
        calls = message.get("tool_calls")
        if isinstance(before, list) and isinstance(calls, list):  # templates want them together
            messages[-1] = {**messages[-1], "tool_calls": before + calls}
        else:
            messages.append(message)
    return messages


def _item(where: str, item: object) -> Body:
    """Return a message for a chat; earlier output may stand among the input as it came."""
    if not isinstance(item, Mapping):
        raise wrong(where, item, "an object with role and content")
    kind = item.get("type", "message")
    if not isinstance(kind, str) or kind not in _ITEMS:
        raise ApiError(
            400,
            f"{where}.type={shown(kind)} is not supported, only {', '.join(_ITEMS)} are",
            param=f"{where}.type",
        )
    return _ITEMS[kind](where, item)


def _message(where: str, item: Body) -> Body:
    check_fields(item, INPUT_FIELDS, f"{where}.")
    role, content = item.get("role"), item.get("content")
    if role not in _ROLES:
        raise wrong(f"{where}.role", role, f"one of {', '.join(_ROLES)}")
    content = _content(f"{where}.content", content)
    # Templates know no developer, which OpenAI's newer models have in place of the system.
    return {"role": "system" if role == "developer" else role, "content": content}


def _call(where: str, item: Body) -> Body:
    """Return the message of an earlier answer that called a function."""
    check_fields(item, INPUT_CALL_FIELDS, f"{where}.")
    called_function(where, item)  # raises here, where the name of the field is known
    function = {"name": item["name"], "arguments": item["arguments"]}
    call = {"id": _call_id(where, item), "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _result(where: str, item: Body) -> Body:
    """Return the message with what a function returned."""
    check_fields(item, INPUT_RESULT_FIELDS, f"{where}.")
    output = _content(f"{where}.output", item.get("output"))
    return {"role": "tool", "tool_call_id": _call_id(where, item), "content": output}


_ITEMS = {"message": _message, "function_call": _call, "function_call_output": _result}


def _call_id(where: str, item: Body) -> str:
    call_id = item.get("call_id")
    if not isinstance(call_id, str) or not call_id:
        raise wrong(f"{where}.call_id", call_id, "the call_id of a function_call")
    return call_id


def _tools(tools: object) -> list[Body]:
    """Return the tools of a chat, in which a function is an object inside its tool."""
    if not isinstance(tools, list):
        raise wrong("tools", tools, "a list of functions")
    return [_tool(f"tools[{i}]", tool) for i, tool in enumerate(tools)]


def _tool(where: str, tool: object) -> Body:
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        raise wrong(where, tool, 'an object {"type": "function", "name": …}')
    function = {name: value for name, value in tool.items() if name != "type"}
    parse_function(where, function)
    return {"type": "function", "function": function}


def _content(where: str, content: object) -> str:
    if isinstance(content, list):
        content = "\n".join(_part(f"{where}[{i}]", part) for i, part in enumerate(content))
    if not isinstance(content, str):
        raise wrong(where, content, "a string or a list of text parts")
    return content


def _part(where: str, part: object) -> str:
    if isinstance(part, Mapping) and part.get("type") in _TEXT_PARTS:
        text = part.get("text")
        if isinstance(text, str):
            return text
    raise wrong(where, part, 'a part {"type": "input_text", "text": "…"}')


def _format(text: Body) -> Body | None:
    """Return the `response_format` of a chat for `text.format`."""
    check_fields(text, RESPONSES_TEXT_FIELDS, "text.")
    wanted = mapping(text, "format")
    if not wanted:
        return None
    check_fields(wanted, RESPONSES_TEXT_FORMAT_FIELDS, "text.format.")
    kind = wanted.get("type")
    if kind == "json_schema":
        schema = {name: value for name, value in wanted.items() if name != "type"}
        return {"type": kind, "json_schema": schema}
    return {"type": kind}


def _check_metadata(metadata: Body) -> None:
    if len(metadata) > _MAX_METADATA or not all(isinstance(v, str) for v in metadata.values()):
        raise wrong("metadata", dict(metadata), f"an object of at most {_MAX_METADATA} strings")
