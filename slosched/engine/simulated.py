"""A device that takes as long as a latency model says, in virtual time."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from slosched.core import (
    BatchShape,
    EndReason,
    LatencyModel,
    Request,
    ScheduledBatch,
    StepResult,
)

DRIFT_PERIOD_S = 120.0
"""How long a drifting device takes to become slower, faster and itself again."""


class VirtualClock:
    """Time that passes only when somebody says so."""

    def __init__(self, now_s: float = 0.0) -> None:
        self._now_s = now_s

    def now_s(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        self._now_s += seconds

    def advance_to(self, now_s: float) -> None:
        """Go forward to `now_s`; never back."""
        self._now_s = max(self._now_s, now_s)


class SimulatedExecutor:
    """Executes a batch by letting its predicted time pass.

    `output_lengths` gives the true number of output tokens by request id; only the executor knows
    it, and it ends a request there as a real model would by its end-of-sequence token.  A request
    that is not in it runs to its limit.  With `noise` > 0 each step is multiplied by a lognormal
    factor of that sigma and mean one.  With `drift` > 0 the device becomes slower and faster by
    that share, in a sine over time.
    """

    def __init__(
        self,
        model: LatencyModel,
        clock: VirtualClock,
        output_lengths: Mapping[str, int],
        *,
        noise: float = 0.0,
        drift: float = 0.0,
        rng: np.random.Generator | None = None,
    ) -> None:
        if noise > 0 and rng is None:
            raise ValueError("noise needs a random generator: pass rng=np.random.default_rng(seed)")
        if not 0 <= drift < 1:
            raise ValueError(f"drift must be a share in [0, 1), not {drift!r}")
        self._predict = model.predict
        self._clock = clock
        self._output_lengths = output_lengths
        self._noise = noise
        self._drift = drift
        self._rng = rng
        self._is_disturbed = noise > 0 or drift > 0

    def pass_time(self, shape: BatchShape) -> float:
        """Let the time of one step pass; how long it was."""
        elapsed_s = self._predict(shape)
        if self._is_disturbed:
            elapsed_s = self._disturbed(elapsed_s)
        self._clock.advance(elapsed_s)
        return elapsed_s

    def _disturbed(self, elapsed_s: float) -> float:
        if self._noise > 0 and self._rng is not None:
            factor = self._rng.lognormal(-0.5 * self._noise**2, self._noise)
            elapsed_s *= round(float(factor), 9)  # machines differ in the last bit of exp
        if self._drift > 0:
            angle = 2 * math.pi * self._clock.now_s() / DRIFT_PERIOD_S
            elapsed_s *= 1 + self._drift * round(math.sin(angle), 9)
        return elapsed_s

    def num_tokens_left(self, request: Request) -> int:
        """Tokens that it has yet to emit; only the device can know."""
        length = self._output_lengths.get(request.request_id, request.max_tokens)
        return min(length, request.max_tokens) - request.num_output_tokens

    def end_reason(self, request: Request) -> EndReason:
        """How a request that has emitted all its tokens came to its end."""
        length = self._output_lengths.get(request.request_id)
        stopped = length is not None and request.num_output_tokens >= length
        return EndReason.STOP if stopped else EndReason.LENGTH

    def execute(self, batch: ScheduledBatch) -> StepResult:
        return self.result(batch, self.pass_time(batch.shape))

    def result(self, batch: ScheduledBatch, elapsed_s: float) -> StepResult:
        """What comes out of a batch, however long it took."""
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
        """Nothing is kept."""
