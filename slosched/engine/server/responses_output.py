"""The output of /v1/responses: messages and calls of functions, as items and as events.

Items and events are those of OpenAI's API reference ("Responses", streaming events).
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from slosched.engine.server.logprobs import Told, entries
from slosched.engine.server.respond import Json
from slosched.engine.server.tool_calls import Reader


class Event(NamedTuple):
    """An event of a stream, without its number."""

    kind: str
    fields: Json


class _Item(Protocol):
    """A part of the output."""

    def begin(self) -> Iterator[Event]:
        """Yield the events before its first text."""

    def end(self, status: str) -> Iterator[Event]:
        """Yield the events after its last text; `status` is `completed` or `incomplete`."""

    def document(self, status: str) -> Json:
        """Return the item with all text that has come."""


class Output:
    """What an answer is made of, as its text comes."""

    def __init__(self, answer_id: str, reader: Reader | None) -> None:
        """Find the calls with a reader; without one all text is a message."""
        self._answer_id = answer_id
        self._reader = reader
        self._items: list[_Item] = []
        self._told: list[Told] = []
        """What is told of the tokens whose text has not come yet."""

    def begin(self) -> Iterator[Event]:
        """Yield the events before the first text."""
        if self._reader is None:
            yield from self._begin(self._message())

    def push(self, text: str, told: Told | None = None) -> Iterator[Event]:
        """Take the next token's text, and what is told of the token; yield its events.

        What is told of tokens of calls is left out: they are no text.
        """
        if told is not None and (self._reader is None or self._reader.is_in_text):
            self._told.append(told)
        if self._reader is None:
            yield from self._text(text)
            return
        for part in self._reader.push(text):
            if isinstance(part, str):
                yield from self._text(part)
                continue
            if part.name is not None:
                yield from self._begin(_Call(len(self._items), part.name))
            call = self._items[-1]
            assert isinstance(call, _Call)
            yield from call.push(part.arguments)
        if not self._reader.is_in_text:
            self._told = []

    def end(self, status: str) -> Iterator[Event]:
        """Yield the events after the last text; `status` is `completed` or `incomplete`."""
        if self._reader is not None and (held := self._reader.flush()):
            yield from self._text(held)
        if self._items:
            yield from self._items[-1].end(status)

    def items(self, status: str) -> list[Json]:
        """Return the output with all text that has come; `status` is that of the last item."""
        whole = [item.document("completed") for item in self._items[:-1]]
        return whole + [item.document(status) for item in self._items[-1:]]

    def _text(self, text: str) -> Iterator[Event]:
        message = self._items[-1] if self._items else None
        if not isinstance(message, _Message):
            message = self._message()
            yield from self._begin(message)
        told, self._told = self._told, []
        yield from message.push(text, told)

    def _begin(self, item: _Item) -> Iterator[Event]:
        """Begin an item, which ends the one before it."""
        if self._items:
            yield from self._items[-1].end("completed")
        self._items.append(item)
        yield from item.begin()

    def _message(self) -> _Message:
        place = len(self._items)
        return _Message(f"msg-{self._answer_id}" + (f"-{place}" if place else ""), place)


class _Message:
    """A message with one text."""

    def __init__(self, item_id: str, place: int) -> None:
        self._id = item_id
        self._place = place
        self._text: str | None = None
        self._logprobs: list[Json] = []
        self._num_shown = 0
        """How many of them have been in a delta."""
        self._at: Json = {"item_id": item_id, "output_index": place, "content_index": 0}

    def begin(self) -> Iterator[Event]:
        at: Json = {"output_index": self._place, "item": self.document("in_progress")}
        yield Event("response.output_item.added", at)
        yield Event("response.content_part.added", {**self._at, "part": _part("", ())})

    def push(self, text: str, told: Sequence[Told]) -> Iterator[Event]:
        """Take the next text with what is told of its tokens, and yield the events of that."""
        self._text = (self._text or "") + text
        self._logprobs += entries(told)
        if text:
            logprobs = self._logprobs[self._num_shown :]
            self._num_shown = len(self._logprobs)
            delta = {**self._at, "delta": text, "logprobs": logprobs}
            yield Event("response.output_text.delta", delta)

    def end(self, status: str) -> Iterator[Event]:
        text, logprobs = self._text or "", self._logprobs
        yield Event("response.output_text.done", {**self._at, "text": text, "logprobs": logprobs})
        yield Event("response.content_part.done", {**self._at, "part": _part(text, logprobs)})
        at: Json = {"output_index": self._place, "item": self.document(status)}
        yield Event("response.output_item.done", at)

    def document(self, status: str) -> Json:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": [] if self._text is None else [_part(self._text, self._logprobs)],
        }


class _Call:
    """A call with the arguments that have come so far."""

    def __init__(self, place: int, name: str) -> None:
        self._place = place
        self._name = name
        self._arguments = ""
        self._number = uuid.uuid4().hex[:24]
        self._at: Json = {"item_id": f"fc_{self._number}", "output_index": place}

    def begin(self) -> Iterator[Event]:
        at: Json = {"output_index": self._place, "item": self.document("in_progress")}
        yield Event("response.output_item.added", at)

    def push(self, text: str) -> Iterator[Event]:
        """Take the next text of the arguments, and yield the events of that."""
        self._arguments += text
        if text:
            yield Event("response.function_call_arguments.delta", {**self._at, "delta": text})

    def end(self, status: str) -> Iterator[Event]:
        said = {"name": self._name, "arguments": self._arguments}
        yield Event("response.function_call_arguments.done", {**self._at, **said})
        at: Json = {"output_index": self._place, "item": self.document(status)}
        yield Event("response.output_item.done", at)

    def document(self, status: str) -> Json:
        return {
            "id": f"fc_{self._number}",
            "type": "function_call",
            "call_id": f"call_{self._number}",
            "name": self._name,
            "arguments": self._arguments,
            "status": status,
        }


def _part(text: str, logprobs: Sequence[Json]) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}
