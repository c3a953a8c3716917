"""Answers that call functions: from the text that follows the grammar to OpenAI's `tool_calls`."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator
from typing import NamedTuple

from slosched.engine.server.choices import ChatFormat
from slosched.engine.server.respond import Json
from slosched.engine.server.tools import Tools

_HEAD = re.compile(r'[\s\[\]{},]*"name"\s*:\s*"([^"]*)"\s*,\s*"parameters"\s*:\s*\{')
"""What stands before the arguments of a call, with their first brace."""


class CallPart(NamedTuple):
    """New text of one call."""

    place: int
    """The place of the call among those of its answer."""
    name: str | None
    """The name of the function, in the first part of a call."""
    arguments: str


class CallReader:
    """Finds the calls in one answer as its text comes."""

    def __init__(self, named: str | None) -> None:
        """Expect the arguments of the function `named`, or a list of calls if that is None."""
        self._named = named
        self._num_calls = 0
        self._head = ""
        """Text since the end of the last arguments."""
        self._depth = 0
        """How many braces of the arguments are open."""
        self._is_string = self._is_escaped = False

    def push(self, text: str) -> list[CallPart]:
        """Return the parts of calls that are in the next piece of the answer."""
        if self._named is None:
            return list(self._parts(text))
        name = None if self._num_calls else self._named
        self._num_calls = 1
        return [CallPart(0, name, text)] if text or name else []

    def _parts(self, text: str) -> Iterator[CallPart]:
        name, begin = None, 0
        for at, char in enumerate(text):
            if not self._depth:
                self._head += char
                head = _HEAD.fullmatch(self._head) if char == "{" else None
                if head is not None:
                    name, begin, self._head, self._depth = head[1], at, "", 1
                    self._num_calls += 1
            elif self._closes(char):
                yield CallPart(self._num_calls - 1, name, text[begin : at + 1])
                name = None
        if self._depth:
            yield CallPart(self._num_calls - 1, name, text[begin:])

    def _closes(self, char: str) -> bool:
        """Count the next character of the arguments; return whether it is their last."""
        if self._is_string:
            self._is_string = self._is_escaped or char != '"'
            self._is_escaped = char == "\\" and not self._is_escaped
        elif char == '"':
            self._is_string = True
        else:
            self._depth += (char == "{") - (char == "}")
        return not self._depth


class ToolFormat(ChatFormat):
    """The form of chat answers that call functions."""

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self._readers: dict[int, CallReader] = {}
        """A reader for each answer of a stream, by its place."""

    def whole(self, text: str) -> Json:
        calls: list[Json] = []
        for part in CallReader(self._tools.named).push(text):
            calls.append(_call(part))
        return {"message": {"role": "assistant", "content": None, "tool_calls": calls}}

    def delta(self, text: str, is_first: bool, place: int, /) -> Json:
        role: Json = {"role": "assistant", "content": None} if is_first else {}
        reader = self._readers.setdefault(place, CallReader(self._tools.named))
        calls = [{"index": part.place, **_call(part)} for part in reader.push(text)]
        return {"delta": {**role, **({"tool_calls": calls} if calls else {})}}

    def finish_reason(self, reason: str | None) -> str | None:
        return "tool_calls" if reason == "stop" else reason


def _call(part: CallPart) -> Json:
    """Return a call, or the further arguments of one that has begun."""
    if part.name is None:
        return {"function": {"arguments": part.arguments}}
    function = {"name": part.name, "arguments": part.arguments}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}
