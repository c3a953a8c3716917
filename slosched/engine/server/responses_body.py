"""The bodies of /v1/responses, as bodies of a chat that ask for the same."""

from __future__ import annotations

from collections.abc import Mapping

from slosched.engine.server.errors import ApiError
from slosched.engine.server.fields import (
    INPUT_FIELDS,
    RESPONSES_TEXT_FIELDS,
    RESPONSES_TEXT_FORMAT_FIELDS,
    check_fields,
)
from slosched.engine.server.values import Body, mapping, shown, wrong

_ROLES = ("user", "assistant", "system", "developer")
_TEXT_PARTS = ("input_text", "output_text", "text")
_NOT_OF_A_CHAT = frozenset({"input", "instructions", "max_output_tokens", "text", "stream_options"})
_MAX_METADATA = 16


def as_chat(body: Body) -> Body:
    """Return a body for a chat; raise ApiError (400) for what is wrong or not supported."""
    check_fields(mapping(body, "stream_options"), frozenset(), "stream_options.")
    _check_metadata(mapping(body, "metadata"))
    chat = {name: value for name, value in body.items() if name not in _NOT_OF_A_CHAT}
    chat["messages"] = [*_instructions(body), *_messages(body.get("input"))]
    if (limit := body.get("max_output_tokens")) is not None:
        if type(limit) is not int or limit < 1:
            raise wrong("max_output_tokens", limit, "an integer >= 1")
        chat["max_tokens"] = limit
    if (response_format := _format(mapping(body, "text"))) is not None:
        chat["response_format"] = response_format
    return chat


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
    return [_message(f"input[{i}]", item) for i, item in enumerate(value)]


def _message(where: str, item: object) -> Body:
    """Return a message for a chat; earlier output may stand among the input as it came."""
    if not isinstance(item, Mapping):
        raise wrong(where, item, "an object with role and content")
    if (kind := item.get("type", "message")) != "message":
        raise ApiError(
            400,
            f"{where}.type={shown(kind)} is not supported, only 'message' is",
            param=f"{where}.type",
        )
    check_fields(item, INPUT_FIELDS, f"{where}.")
    role, content = item.get("role"), item.get("content")
    if role not in _ROLES:
        raise wrong(f"{where}.role", role, f"one of {', '.join(_ROLES)}")
    if isinstance(content, list):
        parts = [_part(f"{where}.content[{i}]", part) for i, part in enumerate(content)]
        content = "\n".join(parts)
    if not isinstance(content, str):
        raise wrong(f"{where}.content", content, "a string or a list of text parts")
    # Templates know no developer, which OpenAI's newer models have in place of the system.
    return {"role": "system" if role == "developer" else role, "content": content}


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
