"""The output of /v1/responses: a message, or calls of functions, as items and as events.

Items and events are those of OpenAI's API reference ("Responses", streaming events).
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from slosched.engine.server.respond import Json
from slosched.engine.server.tool_calls import CallReader

_AT: Json = {"output_index": 0, "content_index": 0}
"""The place of the only part of a message, which is the only item."""


class Event(NamedTuple):
    """An event of a stream, without its number."""

    kind: str
    fields: Json


class Output(Protocol):
    """What an answer is made of, as its text comes."""

    def begin(self) -> Iterator[Event]:
        """Yield the events before the first text."""

    def push(self, text: str) -> Iterator[Event]:
        """Take the next text, and yield its events."""

    def end(self, status: str) -> Iterator[Event]:
        """Yield the events after the last text; `status` is `completed` or `incomplete`."""

    def items(self, status: str) -> list[Json]:
        """Return the output with all text that has come; `status` is that of the last item."""


class MessageOutput:
    """A message with one text."""

    def __init__(self, item_id: str) -> None:
        self._id = item_id
        self._text: str | None = None

    def begin(self) -> Iterator[Event]:
        [message] = self.items("in_progress")
        yield Event("response.output_item.added", {"output_index": 0, "item": message})
        yield Event("response.content_part.added", {"item_id": self._id, "part": _part(""), **_AT})

    def push(self, text: str) -> Iterator[Event]:
        self._text = (self._text or "") + text
        if text:
            delta = {"item_id": self._id, "delta": text, "logprobs": [], **_AT}
            yield Event("response.output_text.delta", delta)

    def end(self, status: str) -> Iterator[Event]:
        at, text = {"item_id": self._id, **_AT}, self._text or ""
        yield Event("response.output_text.done", {**at, "text": text, "logprobs": []})
        yield Event("response.content_part.done", {**at, "part": _part(text)})
        [message] = self.items(status)
        yield Event("response.output_item.done", {"output_index": 0, "item": message})

    def items(self, status: str) -> list[Json]:
        content = [] if self._text is None else [_part(self._text)]
        return [
            {
                "id": self._id,
                "type": "message",
                "role": "assistant",
                "status": status,
                "content": content,
            }
        ]


class CallsOutput:
    """One call of a function, or several, one after the other."""

    def __init__(self, named: str | None) -> None:
        """Expect the arguments of the function `named`, or a list of calls if that is None."""
        self._reader = CallReader(named)
        self._calls: list[_Call] = []

    def begin(self) -> Iterator[Event]:
        yield from ()

    def push(self, text: str) -> Iterator[Event]:
        for part in self._reader.push(text):
            if part.name is not None:
                yield from self.end("completed")  # the call before this one, if there is any
                self._calls.append(_Call(part.name))
                item = self._calls[-1].item("in_progress")
                yield Event(
                    "response.output_item.added", {"output_index": part.place, "item": item}
                )
            call = self._calls[-1]
            call.arguments += part.arguments
            if part.arguments:
                at = {"item_id": call.item_id, "output_index": part.place}
                yield Event(
                    "response.function_call_arguments.delta", {**at, "delta": part.arguments}
                )

    def end(self, status: str) -> Iterator[Event]:
        if not self._calls:
            return
        call, place = self._calls[-1], len(self._calls) - 1
        said = {"item_id": call.item_id, "name": call.name, "arguments": call.arguments}
        yield Event("response.function_call_arguments.done", {**said, "output_index": place})
        done = {"output_index": place, "item": call.item(status)}
        yield Event("response.output_item.done", done)

    def items(self, status: str) -> list[Json]:
        whole = [call.item("completed") for call in self._calls[:-1]]
        return whole + [call.item(status) for call in self._calls[-1:]]


@dataclass
class _Call:
    """A call with the arguments that have come so far."""

    name: str
    arguments: str = ""
    number: str = field(default_factory=lambda: uuid.uuid4().hex[:24])

    @property
    def item_id(self) -> str:
        return f"fc_{self.number}"

    def item(self, status: str) -> Json:
        return {
            "id": self.item_id,
            "type": "function_call",
            "call_id": f"call_{self.number}",
            "name": self.name,
            "arguments": self.arguments,
            "status": status,
        }


def _part(text: str) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
