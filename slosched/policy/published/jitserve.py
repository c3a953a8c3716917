"""JITServe: in every frame the batch with the most goodput per second (GMAX)."""

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
from slosched.policy.kit.checks import check_at_least, check_positive_share
from slosched.policy.kit.decode_first import add_prefills
from slosched.policy.kit.drop import Drop, drop_late
from slosched.policy.kit.lengths import Floats, OutputLengths

_OUTPUT_TOKEN_VALUE = 8.0
"""Value of an output token in prompt tokens (`RequestPhaseWeight` of the artifact)."""
_LEAST_RATIO = 1e-6


@dataclass
class JITServe(PlansBesideDecodes):
    """Grouped margin goodput maximization: requests of the highest value per time still needed run.

    1. At the start of a frame each request gets a density: its value divided by the time to
       generate the rest of it, at v seconds per token.  A prompt token has value 1 and an output
       token 8; the value of late tokens is multiplied by min(1, due time / predicted time).
    2. If there are more requests than a batch holds (B), those with at least `cutoff` of the B-th
       best density are sorted by length.  Of all B neighbours, those with the largest sum of
       densities are chosen.
    3. A running request that was not chosen is preempted for a chosen one that waits, if the gain
       over a frame is more than the batch earns in the time that the preemption costs.
    4. Each step of the frame holds every running decode, then prompts by density until the token
       budget is full: first those that have begun, then chosen or new ones, then the others.

    Source: JITServe (NSDI '26, arXiv 2504.20068v3, formerly Tempo), its GMAX; the artifact
    (`UIUC-MLSys/JITServe` at 95fc1de: `SLOPolicy.reward_estimation` → `_density`,
    `_recompute_bins_sliding_window` → `_choose`, `schedule_interval` → `frame_steps`,
    `penalty_factor` → `penalty`).  As in its code, the value of a request that has begun includes
    the value of its past tokens.  v is predicted for the running decodes; the artifact measures it.
    The end-to-end deadline of a request without one is TTFT + TPOT * expected output.  Left out:
    compound requests (no trace here has them), the shrinking of B by measured TBT, and the
    artifact's cap of two prefill tokens per step, which looks like a slip.  The paper does not say
    how much priority waiting adds; `patience` is slosched's own.

    The expected output length is a quantile over finished requests that were longer than this one
    is already, instead of the paper's quantile regression forest over prompts.  Both begin high and
    are refined.
    """

    token_budget: int = tunable(512, 128, 256, 1024, 2048)
    max_batch: int = tunable(1024, 32, 64, 128)
    """B, unless there are fewer seats."""
    frame_steps: int = tunable(50, 10, 20)
    cutoff: float = 0.95
    """p: share of the B-th best density that a request needs to be considered."""
    quantile: float = tunable(0.9, 0.5)
    """Quantile of the finished requests' lengths that a request is expected to reach."""
    penalty: float = tunable(1.0, 2.0)
    """Exponent of the ratio by which late tokens lose value."""
    patience: float = 0.01
    """Share by which each frame of waiting raises the density, against starvation."""
    prior_output_tokens: int = 200
    drop: Drop = tunable(Drop.NEVER, Drop.EXPIRED, Drop.INFEASIBLE)

    def __post_init__(self) -> None:
        check_at_least(
            1,
            token_budget=self.token_budget,
            max_batch=self.max_batch,
            frame_steps=self.frame_steps,
        )
        check_positive_share(cutoff=self.cutoff, quantile=self.quantile)
        self.reset()

    def reset(self) -> None:
        self._lengths = OutputLengths(self.prior_output_tokens)
        self._num_steps = 0
        self._densities: dict[str, float] = {}
        """Densities by id of all requests seen since the frame began."""
        self._passed_over: frozenset[str] = frozenset()
        """Ids of the requests that were there when the frame began and were not chosen."""

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
        """Plan the rest within a frame, in which every decode runs.

        Return None at the start of a frame, if a running prompt has emitted tokens before, or if a
        decode may have no density since another policy began it.
        """
        model = view.latency_model
        batch = BatchBuilder(view, beside=decodes, token_budget=self.token_budget)
        if (
            model is None
            or view.follows_another
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
        """Return ids of the `num` neighbours in length with the largest sum of densities (GMAX)."""
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
        """Preempt the worst running requests not chosen, for the best chosen ones that wait."""
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
        """Add prompts that have begun, in order, then waiting ones, the chosen first."""
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
        """Note the density of each request, which is kept until the frame ends."""
        emitted = np.array([r.num_output_tokens for r in requests], dtype=np.float64)
        most = np.array([r.max_tokens for r in requests], dtype=np.float64) - emitted
        left = np.minimum(self._lengths.upper_left(emitted, self.quantile), most)
        prompts = np.array([r.num_prompt_tokens for r in requests], dtype=np.float64)
        served_s = view.now_s - np.array([r.arrival_s for r in requests], dtype=np.float64)
        left_s = np.maximum(left * token_s, _LEAST_RATIO)
        ttft_s = np.array([r.slo.ttft_s for r in requests], dtype=np.float64)
        first_s = served_s + np.array(
            [
                0.0
                if r.num_output_tokens
                else model.predict_prefill(r.num_uncomputed_tokens, r.num_computed_tokens)
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
        """Return the share of a token's value that is left when it comes at `predicted_s`."""
        ratio = promised_s / np.maximum(predicted_s, _LEAST_RATIO)
        worth: Floats = np.clip(ratio, _LEAST_RATIO, 1.0) ** self.penalty
        return worth


def _token_s(view: SchedulerView, model: LatencyModel) -> float:
    """Return v, the time of a step of the present decodes, or of one decode."""
    contexts = [r.num_computed_tokens + 1 for r in view.running if r.num_output_tokens]
    shape = BatchShape()
    shape.add_decodes(contexts or [1])
    return model.predict(shape)


def _end_to_end_s(requests: Sequence[Request], num_output: Floats, ttft_s: Floats) -> Floats:
    """Return the end-to-end SLOs: e2e, or TTFT and then a TPOT for each expected token."""
    e2e_s = np.array([r.slo.e2e_s or math.inf for r in requests], dtype=np.float64)
    tpot_s = np.array([r.slo.tpot_s for r in requests], dtype=np.float64)
    paced = np.where(num_output > 1, tpot_s, 0.0) * np.maximum(num_output - 1, 1.0)
    whole_s: Floats = np.minimum(e2e_s, ttft_s + paced)
    return whole_s


def _last_served_s(request: Request) -> float:
    return request.token_times_s[-1] if request.token_times_s else request.arrival_s


def _stall_s(request: Request, view: SchedulerView, model: LatencyModel) -> float:
    """Return the time that preempting costs: copying its blocks twice, or computing them again."""
    if view.limits.preemption_mode is PreemptionMode.RECOMPUTE:
        return model.predict_prefill(max(1, request.num_computed_tokens))
    idle, copy = BatchShape(), BatchShape()
    for shape in (idle, copy):
        shape.add_decodes([1])
    copy.num_swapped_blocks = 2 * view.kv.num_held_blocks(request.request_id)
    return model.predict(copy) - model.predict(idle)
