"""Chat answers that call functions, or may, as OpenAI's API has them."""

from __future__ import annotations

import uuid
from collections.abc import Iterable

from slosched.engine.server.choices import ChatFormat
from slosched.engine.server.respond import Json
from slosched.engine.server.tool_calls import CallPart, Reader, reader_of
from slosched.engine.server.tools import Tools


class ToolFormat(ChatFormat):
    """The form of these answers, whole or as a stream."""

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self._readers: dict[int, Reader] = {}
        """A reader for each answer, by its place."""

    def whole(self, text: str, place: int) -> Json:
        reader = self._reader(place)
        content, calls = _content_and_calls([*reader.push(text), reader.flush()])
        message: Json = {"role": "assistant", "content": content or (None if calls else "")}
        return {"message": {**message, **({"tool_calls": calls} if calls else {})}}

    def delta(self, text: str, place: int, *, is_first: bool, is_last: bool) -> Json:
        reader = self._reader(place)
        parts = [*reader.push(text), reader.flush() if is_last else ""]
        content, calls = _content_and_calls(parts, has_places=True)
        delta: Json = {"role": "assistant", "content": None} if is_first else {}
        delta |= {"content": content} if content else {}
        return {"delta": {**delta, **({"tool_calls": calls} if calls else {})}}

    def finish_reason(self, reason: str | None, place: int) -> str | None:
        return "tool_calls" if reason == "stop" and self._reader(place).num_calls else reason

    def _reader(self, place: int) -> Reader:
        if place not in self._readers:
            self._readers[place] = reader_of(self._tools)
        return self._readers[place]


def _content_and_calls(
    parts: Iterable[CallPart | str], *, has_places: bool = False
) -> tuple[str, list[Json]]:
    """Return the text and the calls among the parts; those of a stream have places."""
    content, calls = "", list[Json]()
    for part in parts:
        if isinstance(part, str):
            content += part
        else:
            calls.append({**({"index": part.place} if has_places else {}), **_call(part)})
    return content, calls


def _call(part: CallPart) -> Json:
    """Return a call, or the further arguments of one that has begun."""
    if part.name is None:
        return {"function": {"arguments": part.arguments}}
    function = {"name": part.name, "arguments": part.arguments}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}
