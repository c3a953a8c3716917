"""When the next step begins, and how long each one took."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from slosched.core import BatchShape, LatencyModel
from slosched.perfmodel import Measurement
from slosched.perfmodel.measurement import Chunk

Record = Callable[[Measurement], None]
"""Told of every step that held something."""


class StepTimes:
    """Steps that vLLM has launched and whose output is not back yet, oldest first.

    The synchronous loop has none when it plans, the asynchronous one has one, pipelines more.
    """

    def __init__(self, model: LatencyModel | None, record: Record | None = None) -> None:
        self._model = model
        self._record = record
        self._in_flight: deque[tuple[tuple[Chunk, ...], BatchShape, float, float]] = deque()
        """What is in it, when it was launched, how long it is expected to take."""
        self._last_end_s = 0.0

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    def next_begins_s(self, now_s: float) -> float:
        """When a step that is planned now will begin: after all that are in flight."""
        begins_s = self._last_end_s
        for _, _, launched_s, expected_s in self._in_flight:
            begins_s = max(begins_s, launched_s) + expected_s
        return max(begins_s, now_s)

    def launched(self, chunks: tuple[Chunk, ...], now_s: float) -> None:
        """A step goes to the device; an empty one, too, since vLLM returns those as well."""
        shape = BatchShape()
        for num_new_tokens, num_prior_tokens in chunks:
            shape.add(num_new_tokens, num_prior_tokens)
        is_known = self._model is not None and shape.num_tokens
        expected_s = self._model.predict(shape) if is_known and self._model else 0.0
        self._in_flight.append((chunks, shape, now_s, expected_s))

    def returned(self, now_s: float) -> None:
        """The oldest step is back; what it took teaches the latency model."""
        chunks, shape, launched_s, _ = self._in_flight.popleft()
        began_s = max(launched_s, self._last_end_s)
        self._last_end_s = now_s
        if not chunks:
            return
        if self._model is not None:
            self._model.observe(shape, now_s - began_s)
        if self._record is not None and now_s > began_s:
            self._record(Measurement(chunks, now_s - began_s))
