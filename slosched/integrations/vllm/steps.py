"""The start of the next step, and the time that each step took."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

from slosched.core import BatchShape, LatencyModel
from slosched.perfmodel import Measurement
from slosched.perfmodel.measurement import Chunk

Record = Callable[[Measurement], None]
"""A function that receives every recorded step."""


class _Step(NamedTuple):
    num_tokens: int
    chunks: tuple[Chunk, ...]
    """The step's chunks; empty unless steps are recorded."""
    shape: BatchShape
    """The batch's shape; empty if there is no latency model."""
    launched_s: float
    expected_s: float


class StepTimes:
    """Steps that vLLM has launched and whose output is not back yet, oldest first.

    When it plans, the synchronous loop has none in flight, the asynchronous one has one, and
    pipelines have more.
    """

    def __init__(self, model: LatencyModel | None, record: Record | None = None) -> None:
        self._model = model
        self._record = record
        self._in_flight: deque[_Step] = deque()
        self._last_end_s = 0.0

    @property
    def num_in_flight(self) -> int:
        """Return the number of steps whose tokens are still to come.

        While requests wait, the asynchronous loop has a step in flight even if all are empty.
        """
        return sum(1 for step in self._in_flight if step.num_tokens)

    def next_begins_s(self, now_s: float) -> float:
        """Return when a step that is planned now will begin: after all that are in flight."""
        begins_s = self._last_end_s
        for step in self._in_flight:
            begins_s = max(begins_s, step.launched_s) + step.expected_s
        return max(begins_s, now_s)

    def launched(
        self,
        num_tokens: int,
        chunks: Iterable[Chunk],
        now_s: float,
        shape: BatchShape | None = None,
    ) -> None:
        """Note a step that goes to the device, even an empty one, since vLLM returns those, too.

        `shape` is the shape of the chunks, if the caller knows it; summing up hundreds of chunks
        again costs time.
        """
        held = () if self._record is None else tuple(chunks)
        expected_s = 0.0
        if self._model is None:
            shape = BatchShape()
        else:
            shape = shape or _shape_of(held or chunks)
            expected_s = self._model.predict(shape) if shape.num_tokens else 0.0
        self._in_flight.append(_Step(num_tokens, held, shape, now_s, expected_s))

    def returned(self, now_s: float) -> None:
        """Note that the oldest step is back, and let the latency model learn from its time."""
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
