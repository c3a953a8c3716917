"""A device that takes as long as a latency model says, in virtual time."""

from __future__ import annotations

from collections.abc import Mapping

from slosched.core import (
    BatchShape,
    EndReason,
    LatencyModel,
    Request,
    ScheduledBatch,
    StepResult,
)
from slosched.simulator.disturbances import UNDISTURBED, Disturbances, DisturbedTimes


class VirtualClock:
    """A clock whose time passes only when it is advanced."""

    def __init__(self, now_s: float = 0.0) -> None:
        self._now_s = now_s

    def now_s(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        self._now_s += seconds

    def advance_to(self, now_s: float) -> None:
        """Advance to `now_s`; the clock never goes back."""
        self._now_s = max(self._now_s, now_s)


class SimulatedExecutor:
    """Executes a batch by letting its predicted time pass.

    `output_lengths` gives the true number of output tokens by request id. Only the executor knows
    it, and ends a request there, as a real model would by its end-of-sequence token.  A request
    without an entry runs to its limit.  `disturbances` are drawn from `seed`.
    """

    def __init__(
        self,
        model: LatencyModel,
        clock: VirtualClock,
        output_lengths: Mapping[str, int],
        disturbances: Disturbances = UNDISTURBED,
        seed: int = 0,
    ) -> None:
        self._predict = model.predict
        self._clock = clock
        self._output_lengths = output_lengths
        self._disturbed = (
            None if disturbances.are_none else DisturbedTimes(disturbances, seed).seconds
        )

    def pass_time(self, shape: BatchShape) -> float:
        """Let the time of one step pass, and return it in seconds."""
        elapsed_s = self._predict(shape)
        if self._disturbed is not None:
            elapsed_s = self._disturbed(elapsed_s, self._clock.now_s())
        self._clock.advance(elapsed_s)
        return elapsed_s

    def num_tokens_left(self, request: Request) -> int:
        """Return the tokens that the request has yet to emit, which only the device can know."""
        length = self._output_lengths.get(request.request_id, request.max_tokens)
        return min(length, request.max_tokens) - request.num_output_tokens

    def end_reason(self, request: Request) -> EndReason:
        """Return why a request that has emitted all its tokens ended."""
        length = self._output_lengths.get(request.request_id)
        stopped = length is not None and request.num_output_tokens >= length
        return EndReason.STOP if stopped else EndReason.LENGTH

    def execute(self, batch: ScheduledBatch) -> StepResult:
        return self.result(batch, self.pass_time(batch.shape))

    def result(self, batch: ScheduledBatch, elapsed_s: float) -> StepResult:
        """Return the result of a batch, however long it took."""
        token_ids: dict[str, int] = {}
        stopped: list[str] = []
        length_of = self._output_lengths.get
        for request, num_new, num_prior, emits_token, _ in batch.chunks:
            if emits_token:
                request_id = request.request_id
                token_ids[request_id] = 0
                length = length_of(request_id)
                if length is not None and (
                    num_prior + num_new - request.num_prompt_tokens + 1 >= length
                ):
                    stopped.append(request_id)
        return StepResult(token_ids, frozenset(stopped), elapsed_s)

    def release(self, request_id: str) -> None:
        """Do nothing: the executor keeps nothing of a request."""
