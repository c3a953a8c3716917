"""The messages of a chat, as templates want them."""

from __future__ import annotations

import json
from collections.abc import Mapping

from slosched.engine.server.fields import (
    CALLED_FIELDS,
    MESSAGE_FIELDS,
    TOOL_CALL_FIELDS,
    check_fields,
)
from slosched.engine.server.json_text import parse_json
from slosched.engine.server.tokenizer import Message
from slosched.engine.server.values import Body, mapping, wrong


def parse_messages(body: Body) -> list[Message]:
    """Return the messages; text parts of a list are joined by line breaks.

    A message has role and content, and perhaps the `name` of who speaks, the `tool_calls` of the
    assistant with their arguments as objects, and the `tool_call_id` of a tool's result.
    """
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise wrong("messages", messages, "a list of at least one message")
    return [_message(i, message) for i, message in enumerate(messages)]


def text_of(message: Message) -> str:
    """Return all text of a message that a template may write."""
    calls = json.dumps(message["tool_calls"]) if "tool_calls" in message else ""
    return "".join(value for value in message.values() if isinstance(value, str)) + calls


def _message(i: int, message: object) -> Message:
    where = f"messages[{i}]"
    if not isinstance(message, Mapping):
        raise wrong(where, message, "an object with role and content")
    check_fields(message, MESSAGE_FIELDS, f"{where}.")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise wrong(f"{where}.role", role, "a string such as 'user'")
    if content is None:
        content = ""
    if isinstance(content, list):
        content = "\n".join(_part(f"{where}.content[{j}]", part) for j, part in enumerate(content))
    if not isinstance(content, str):
        raise wrong(f"{where}.content", content, "a string or a list of text parts")
    found: dict[str, object] = {"role": role, "content": content}
    for name in ("name", "tool_call_id"):
        value = message.get(name)
        if value is None:
            continue
        if not isinstance(value, str):
            raise wrong(f"{where}.{name}", value, "a string")
        found[name] = value
    if calls := _calls(f"{where}.tool_calls", message.get("tool_calls")):
        found["tool_calls"] = calls
    return found


def _part(where: str, part: object) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text":
        text = part.get("text")
        if isinstance(text, str):
            return text
    raise wrong(where, part, 'a part {"type": "text", "text": "…"}')


def _calls(where: str, calls: object) -> list[Body]:
    """Return the calls of an earlier answer, with their arguments as objects."""
    if calls is None:
        return []
    if not isinstance(calls, list):
        raise wrong(where, calls, "a list of calls")
    return [_call(f"{where}[{i}]", call) for i, call in enumerate(calls)]


def _call(where: str, call: object) -> Body:
    if not isinstance(call, Mapping):
        raise wrong(where, call, "an object with id, type and function")
    check_fields(call, TOOL_CALL_FIELDS, f"{where}.")
    function = mapping(call, "function")
    check_fields(function, CALLED_FIELDS, f"{where}.function.")
    called = called_function(f"{where}.function", function)
    return {**call, "type": "function", "function": called}


def called_function(where: str, function: Body) -> Body:
    """Return the name of a function that was called, and its arguments as an object.

    Many models write nothing at all where a function has no parameters.
    Raises ApiError (400), with `where` before the name of a field that is wrong.
    """
    name, arguments = function.get("name"), function.get("arguments")
    if not isinstance(name, str) or not name:
        raise wrong(f"{where}.name", name, "the name of a function")
    try:
        given = parse_json(arguments or "{}") if isinstance(arguments, str) else None
    except ValueError:
        given = None
    if not isinstance(given, dict):
        raise wrong(f"{where}.arguments", arguments, "a JSON object as a string")
    return {"name": name, "arguments": given}
