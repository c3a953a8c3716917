"""A device that takes as long as a latency model says, in virtual time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from slosched.core import (
    BatchShape,
    EndReason,
    LatencyModel,
    Request,
    ScheduledBatch,
    StepResult,
)
from slosched.perfmodel.frozen import is_unchanging
from slosched.simulator.disturbances import UNDISTURBED, Disturbances, DisturbedTimes
from slosched.simulator.drafts import AcceptedDrafts

DecodeEnds = Callable[[BatchShape, float, int, float], list[float]]
"""What `FittedModel.decode_ends` is, without a factor."""


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
    without an entry runs to its limit.  `disturbances` are drawn from `seed`.  `accepted` says
    which draft tokens are; without it none are.
    """

    def __init__(
        self,
        model: LatencyModel,
        clock: VirtualClock,
        output_lengths: Mapping[str, int],
        disturbances: Disturbances = UNDISTURBED,
        seed: int = 0,
        accepted: AcceptedDrafts | None = None,
    ) -> None:
        self.model = model
        """What its steps take, but for disturbances."""
        self._predict = model.predict
        self._decode_ends: DecodeEnds | None = None
        if disturbances.are_none and is_unchanging(model):
            self._decode_ends = model.decode_ends
        self._clock = clock
        self._output_lengths = output_lengths
        self._accepted = accepted
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

    @property
    def knows_steps(self) -> bool:
        """Tell whether it is known how long steps will take before they run."""
        return self._decode_ends is not None

    def decode_ends(self, shape: BatchShape, most: int, until_s: float) -> list[float]:
        """Return when steps of the same decodes will end that run from now on; no time passes.

        The first has this shape.  The list has `most` times, or as many as it takes to reach
        `until_s`, and at least one.  Only if this executor `knows_steps`.
        """
        assert self._decode_ends is not None
        return self._decode_ends(shape, self._clock.now_s(), most, until_s)

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
        if batch.drafts:
            return self._result_with_drafts(batch, elapsed_s)
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

    def _result_with_drafts(self, batch: ScheduledBatch, elapsed_s: float) -> StepResult:
        """Return the result of a batch that verifies drafts."""
        token_ids: dict[str, int] = {}
        num_accepted: dict[str, int] = {}
        stopped: list[str] = []
        for chunk in batch.chunks:
            if not chunk.emits_token:
                continue
            request_id = chunk.request.request_id
            num_drafts = len(batch.drafts.get(request_id, ()))
            num_known = chunk.num_known_outputs - num_drafts
            length = self._output_lengths.get(request_id, math.inf)
            accepted = 0
            if num_drafts and self._accepted is not None:
                accepted = self._accepted.num_first(request_id, num_known, num_drafts)
                accepted = num_accepted[request_id] = int(min(accepted, length - num_known - 1))
            token_ids[request_id] = 0
            if num_known + accepted + 1 >= length:
                stopped.append(request_id)
        return StepResult(token_ids, frozenset(stopped), elapsed_s, num_accepted=num_accepted)

    def release(self, request_id: str) -> None:
        """Do nothing: the executor keeps nothing of a request."""
