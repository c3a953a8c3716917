"""When the next step begins, and how long each one took."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

from slosched.core import BatchShape, LatencyModel
from slosched.perfmodel import Measurement
from slosched.perfmodel.measurement import Chunk

Record = Callable[[Measurement], None]
"""Told of every step that held something."""


class _Step(NamedTuple):
    chunks: tuple[Chunk, ...]
    """None, unless steps are recorded."""
    shape: BatchShape
    """Of nothing, if there is no latency model."""
    launched_s: float
    expected_s: float


class StepTimes:
    """Steps that vLLM has launched and whose output is not back yet, oldest first.

    The synchronous loop has none when it plans, the asynchronous one has one, pipelines more.
    """

    def __init__(self, model: LatencyModel | None, record: Record | None = None) -> None:
        self._model = model
        self._record = record
        self._in_flight: deque[_Step] = deque()
        self._last_end_s = 0.0

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    def next_begins_s(self, now_s: float) -> float:
        """When a step that is planned now will begin: after all that are in flight."""
        begins_s = self._last_end_s
        for step in self._in_flight:
            begins_s = max(begins_s, step.launched_s) + step.expected_s
        return max(begins_s, now_s)

    def launched(
        self, chunks: Iterable[Chunk], now_s: float, shape: BatchShape | None = None
    ) -> None:
        """A step goes to the device; an empty one, too, since vLLM returns those as well.

        `shape` is that of the chunks, if somebody has summed it up already: there are hundreds.
        """
        held = () if self._record is None else tuple(chunks)
        expected_s = 0.0
        if self._model is None:
            shape = BatchShape()
        else:
            shape = shape or _shape_of(held or chunks)
            expected_s = self._model.predict(shape) if shape.num_tokens else 0.0
        self._in_flight.append(_Step(held, shape, now_s, expected_s))

    def returned(self, now_s: float) -> None:
        """The oldest step is back; what it took teaches the latency model."""
        step = self._in_flight.popleft()
        took_s = now_s - max(step.launched_s, self._last_end_s)
        self._last_end_s = now_s
        if self._model is not None and step.shape.num_tokens:
            self._model.observe(step.shape, took_s)
        if self._record is not None and step.chunks and took_s > 0:
            self._record(Measurement(step.chunks, took_s))


def _shape_of(chunks: Iterable[Chunk]) -> BatchShape:
    shape = BatchShape()
    for num_new_tokens, num_prior_tokens in chunks:
        shape.add(num_new_tokens, num_prior_tokens)
    return shape
