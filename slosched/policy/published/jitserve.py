"""JITServe: every frame, the batch that earns the most goodput a second (GMAX)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from slosched.batch import BatchBuilder
from slosched.core import (
    BatchShape,
    DecodeGroup,
    LatencyModel,
    PlansBesideDecodes,
    PreemptionMode,
    Request,
    RequestStatus,
    SchedulerOutput,
    SchedulerView,
    group_shape,
    tunable,
)
from slosched.policy.kit.checks import check_at_least
from slosched.policy.kit.decode_first import add_prefills
from slosched.policy.kit.drop import Drop, drop_late
from slosched.policy.kit.lengths import Floats, OutputLengths

_OUTPUT_TOKEN_VALUE = 8.0
"""What an output token is worth, in prompt tokens (`RequestPhaseWeight` of the artifact)."""
_LEAST_RATIO = 1e-6


@dataclass
class JITServe(PlansBesideDecodes):
    """Grouped margin goodput maximization: who earns most for the time it still takes, runs.

    1. At the beginning of a frame each request's density is taken: its value (1 for a prompt
       token, 8 for an output token, times min(1, promised / predicted end) for what would be late)
       divided by the time to generate what is left of it, v a token.
    2. If more are there than a batch holds (B): those with at least `cutoff` of the B-th best
       density, in order of length; of all B in a row the ones with the largest sum are chosen.
    3. A running request that was not chosen is preempted for a waiting one that was, if the gain
       over a frame is more than what the batch earns in the time that the preemption costs.
    4. In each step of the frame: every running decode, then prompts, those begun, those chosen or
       come since, then the others, by density, until the token budget is full.

    Source: JITServe (NSDI '26, arXiv 2504.20068v3, formerly Tempo), its GMAX; the artifact
    (`UIUC-MLSys/JITServe` at 95fc1de: `SLOPolicy.reward_estimation` → `_density`,
    `_recompute_bins_sliding_window` → `_choose`, `schedule_interval` → `frame_steps`,
    `penalty_factor` → `penalty`).  As in its code, the value of a request that has begun includes
    what it has earned already.  v is predicted for the running decodes where the artifact
    measures it; the end-to-end deadline of a request without one is TTFT + TPOT * expected output.
    Left out: compound requests (no trace here has them), the shrinking of B by measured TBT, and
    the artifact's cap of two prefill tokens a step, which looks like a slip.  The paper does not
    say how much priority waiting adds; `patience` is ours.

    Output lengths: a quantile of the finished requests' that were longer than this one is already,
    for the paper's quantile regression forest over prompts; both begin high and are refined.
    """

    token_budget: int = tunable(512, 128, 256, 1024, 2048)
    max_batch: int = tunable(1024, 32, 64, 128)
    """B, unless there are fewer seats."""
    frame_steps: int = tunable(50, 10, 20)
    cutoff: float = 0.95
    """p: the share of the B-th best density that is enough to be in the choice."""
    quantile: float = tunable(0.9, 0.5)
    """Of the finished requests' lengths, what a request is expected to reach."""
    penalty: float = tunable(1.0, 2.0)
    """Power of the ratio by which late tokens lose value."""
    patience: float = 0.01
    """Share by which a frame of waiting raises the density, against starvation."""
    prior_output_tokens: int = 200
    drop: Drop = tunable(Drop.NEVER, Drop.EXPIRED, Drop.INFEASIBLE)

    def __post_init__(self) -> None:
        check_at_least(
            1,
            token_budget=self.token_budget,
            max_batch=self.max_batch,
            frame_steps=self.frame_steps,
        )
        for name in ("cutoff", "quantile"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} must be in (0, 1], not {getattr(self, name)}")
        self.reset()

    def reset(self) -> None:
        self._lengths = OutputLengths(self.prior_output_tokens)
        self._num_steps = 0
        self._densities: dict[str, float] = {}
        """Of everyone seen since the frame began."""
        self._passed_over: frozenset[str] = frozenset()
        """Those that were there when the frame began and were not chosen."""

    def schedule(self, view: SchedulerView) -> SchedulerOutput:
        model = view.model
        self._lengths.update()
        batch = BatchBuilder(view, token_budget=self.token_budget)
        view = drop_late(batch, view, self.drop)
        pending = (*view.running, *view.swapped, *view.waiting)
        if self._num_steps % self.frame_steps == 0:
            self._begin_frame(batch, view, model, pending)
        self._num_steps += 1
        if newcomers := self._newcomers(pending):
            self._rate(newcomers, view, model, _token_s(view, model))
        self._pack(batch, view)
        return batch.build()

    def schedule_beside(self, decodes: DecodeGroup, view: SchedulerView) -> SchedulerOutput | None:
        """Within a frame, in which every decode runs; unless a prompt with outputs is begun."""
        model = view.latency_model
        batch = BatchBuilder(view, beside=decodes, token_budget=self.token_budget)
        if (
            model is None
            or batch.num_free_tokens < 0
            or self._num_steps % self.frame_steps == 0
            or any(r.num_output_tokens for r in view.running)
        ):
            return None
        self._lengths.update()
        view = drop_late(batch, view, self.drop)
        self._num_steps += 1
        if newcomers := self._newcomers((*view.running, *view.waiting)):
            token_s = model.predict(group_shape(decodes))
            self._rate(newcomers, view, model, token_s)
        num_running = decodes.num_decodes + len(view.running)
        begun = sorted(view.running, key=self._density, reverse=True)
        self._add_prompts(batch, begun, view.waiting, num_running)
        return batch.build()

    def _begin_frame(
        self,
        batch: BatchBuilder,
        view: SchedulerView,
        model: LatencyModel,
        pending: Sequence[Request],
    ) -> None:
        self._densities = {}
        self._rate(pending, view, model, _token_s(view, model))
        chosen = self._choose(pending, min(self.max_batch, view.limits.max_num_seqs))
        self._passed_over = frozenset(r.request_id for r in pending) - chosen
        if self._passed_over:
            self._preempt_for_chosen(batch, view, model)

    def _choose(self, pending: Sequence[Request], num: int) -> frozenset[str]:
        """GMAX: of the `num` neighbours in length, the ones of the largest sum of densities."""
        if len(pending) <= num:
            return frozenset(r.request_id for r in pending)
        densities = np.array([self._densities[r.request_id] for r in pending])
        least = self.cutoff * np.partition(densities, -num)[-num]
        best = [r for r, density in zip(pending, densities, strict=True) if density >= least]
        best.sort(key=lambda r: r.num_tokens)
        sums = np.cumsum([0.0, *map(self._density, best)])
        start = int(np.argmax(sums[num:] - sums[:-num]))
        return frozenset(r.request_id for r in best[start : start + num])

    def _preempt_for_chosen(
        self, batch: BatchBuilder, view: SchedulerView, model: LatencyModel
    ) -> None:
        """The worst of the running that were passed over, for the best of the chosen that wait."""
        density = self._density
        # A prompt that has begun goes on to its next token, so that every seat taken earns one.
        losers = [r for r in view.running if r.is_decode and r.request_id in self._passed_over]
        winners = [
            r for r in (*view.swapped, *view.waiting) if r.request_id not in self._passed_over
        ]
        losers.sort(key=density)
        winners.sort(key=density, reverse=True)
        rate = sum(map(density, view.running))
        frame_s = self.frame_steps * _token_s(view, model)
        for loser, winner in zip(losers, winners, strict=False):
            gain = (density(winner) - density(loser)) * frame_s
            if gain <= rate * _stall_s(loser, view, model):
                break
            batch.preempt(loser)

    def _pack(self, batch: BatchBuilder, view: SchedulerView) -> None:
        density = self._density
        dearest = sorted(view.running, key=density, reverse=True)
        victims = [r for r in dearest if not batch.has_left(r)]
        begun = [r for r in victims if not r.is_decode]
        num_made_way = len(batch.preempted) + len(batch.swapped_out)
        batch.add_preempting([r for r in victims if r.is_decode], victims)
        begun = [r for r in begun if not batch.has_left(r)]
        in_need = len(batch.preempted) + len(batch.swapped_out) > num_made_way
        waiting = () if in_need else (*view.swapped, *view.waiting)
        self._add_prompts(batch, begun, waiting, len(victims))

    def _add_prompts(
        self,
        batch: BatchBuilder,
        begun: Sequence[Request],
        waiting: Sequence[Request],
        num_running: int,
    ) -> None:
        """Those that have begun, in order; then those that wait, the chosen ones first."""
        batch.num_free_seqs = min(batch.num_free_seqs, self.max_batch - num_running)
        passed_over, densities = self._passed_over, self._densities
        prefills = [
            *begun,
            *sorted(waiting, key=lambda r: (r.request_id in passed_over, -densities[r.request_id])),
        ]
        add_prefills(batch, prefills, reserved_blocks=batch.blocks_promised(begun))
        for request in prefills:
            if request in batch:
                self._lengths.watch(request)

    def _density(self, request: Request) -> float:
        return self._densities[request.request_id]

    def _newcomers(self, pending: Sequence[Request]) -> list[Request]:
        return [r for r in pending if r.request_id not in self._densities]

    def _rate(
        self,
        requests: Sequence[Request],
        view: SchedulerView,
        model: LatencyModel,
        token_s: float,
    ) -> None:
        """Value a second of each, until the frame ends."""
        emitted = np.array([r.num_output_tokens for r in requests], dtype=np.float64)
        most = np.array([r.max_tokens for r in requests], dtype=np.float64) - emitted
        left = np.minimum(self._lengths.upper_left(emitted, self.quantile), most)
        prompts = np.array([r.num_prompt_tokens for r in requests], dtype=np.float64)
        served_s = view.now_s - np.array([r.arrival_s for r in requests], dtype=np.float64)
        left_s = np.maximum(left * token_s, _LEAST_RATIO)
        ttft_s = np.array([r.slo.ttft_s for r in requests], dtype=np.float64)
        first_s = served_s + np.array(
            [
                0.0 if r.num_output_tokens else model.predict_prefill(r.num_prompt_tokens)
                for r in requests
            ]
        )
        on_time = np.where(emitted > 0, 1.0, self._worth(ttft_s, first_s))
        whole_s = _end_to_end_s(requests, emitted + left, ttft_s)
        late = self._worth(whole_s, served_s + left_s)
        value = prompts * on_time + _OUTPUT_TOKEN_VALUE * (emitted + left * late)
        idle_s = np.array(
            [
                0.0 if r.status is RequestStatus.RUNNING else view.now_s - _last_served_s(r)
                for r in requests
            ]
        )
        waited = idle_s / (self.frame_steps * token_s)
        density = value / left_s * (1 + self.patience * waited)
        self._densities |= zip((r.request_id for r in requests), density.tolist(), strict=True)

    def _worth(self, promised_s: Floats, predicted_s: Floats) -> Floats:
        """Share of a token's value that is left when it comes at `predicted_s`."""
        ratio = promised_s / np.maximum(predicted_s, _LEAST_RATIO)
        worth: Floats = np.clip(ratio, _LEAST_RATIO, 1.0) ** self.penalty
        return worth


def _token_s(view: SchedulerView, model: LatencyModel) -> float:
    """v: the time of a step of the decodes that run now, or of one."""
    contexts = [r.num_computed_tokens + 1 for r in view.running if r.num_output_tokens]
    shape = BatchShape()
    shape.add_decodes(contexts or [1])
    return model.predict(shape)


def _end_to_end_s(requests: Sequence[Request], num_output: Floats, ttft_s: Floats) -> Floats:
    """What was promised end to end: e2e, or TTFT and then a TPOT for each expected token."""
    e2e_s = np.array([r.slo.e2e_s or math.inf for r in requests], dtype=np.float64)
    tpot_s = np.array([r.slo.tpot_s for r in requests], dtype=np.float64)
    paced = np.where(num_output > 1, tpot_s, 0.0) * np.maximum(num_output - 1, 1.0)
    whole_s: Floats = np.minimum(e2e_s, ttft_s + paced)
    return whole_s


def _last_served_s(request: Request) -> float:
    return request.token_times_s[-1] if request.token_times_s else request.arrival_s


def _stall_s(request: Request, view: SchedulerView, model: LatencyModel) -> float:
    """What preempting it costs the device: copying its blocks twice, or computing them anew."""
    if view.limits.preemption_mode is PreemptionMode.RECOMPUTE:
        return model.predict_prefill(max(1, request.num_computed_tokens))
    idle, copy = BatchShape(), BatchShape()
    for shape in (idle, copy):
        shape.add_decodes([1])
    copy.num_swapped_blocks = 2 * view.kv.num_held_blocks(request.request_id)
    return model.predict(copy) - model.predict(idle)
