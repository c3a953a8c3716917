"""SCORPIO: decodes as often as their TPOTs ask for; guards of TTFT and TPOT choose prompts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

from slosched.batch import BatchBuilder
from slosched.core import (
    BatchShape,
    DecodeGroup,
    ForeseesDecodes,
    LatencyModel,
    Limits,
    PlansBesideDecodes,
    Request,
    RequestStatus,
    SchedulerOutput,
    SchedulerView,
    tunable,
)
from slosched.policy.kit.checks import check_at_least, check_positive
from slosched.policy.kit.decode_first import (
    add_prefills,
    decodes_until_s,
    may_start_new,
    split_running,
)
from slosched.policy.kit.deferred import serve_something
from slosched.policy.kit.drop import why_late
from slosched.policy.kit.lengths import OutputLengths

_MAX_ASKED = 256
"""Prompts, the most urgent, that the TTFT guard looks at in one step; it bounds the cost."""
_LEAST_TRP = 0.05
"""TRP of a decode with a very long TPOT or without one: it runs in one of 20 steps."""
_ROUNDING = 1e-9
_MAX_REFUSED = 32
"""Refusals in one step after which the TPOT guard lets no prompt start; it bounds the cost."""


@dataclass
class Scorpio(PlansBesideDecodes, ForeseesDecodes):
    """Decodes by credit, then the prompts that pass two guards, under a token budget.

    1. TTFT guard: prompts in order of deadline.  One that would be late even if the device
       computed only the prompts before it is rejected.
    2. TPOT-relative proportionality: TRP = smallest TPOT of the running requests / own TPOT.  In
       each step a decode earns its TRP as credit.  With a credit of 1 it gets a token and pays 1.
    3. TPOT guard: the virtual batch has as many decodes as the sum of all TRPs, the new prompt's
       included, each of the mean length plus half of the expected output.  The prompt starts if a
       step of this batch is within the smallest TPOT.  Else it waits, and the next one is tried.

    Source: SCORPIO (arXiv 2505.23022), from two sets of notes on its text; its code was not
    available.  Equations 4 and 5 (ITL and TPOT of a batch) → the run's latency model and `epsilon`;
    6 and 7 (prefill times and their sum) → `_ttft_guard`; VBS → `_Running.virtual_batch`.

    The paper leaves open how prompts and decodes share a step.  Here decodes come first and
    prompts are cut to what is left of `token_budget`, as in Sarathi.  Differences: prompts that
    have begun count as running in the TPOT guard; a decode without a TPOT runs in one of 20 steps.
    Left out: the language model that predicts output lengths.

    The expected output length is the mean over finished requests.
    """

    token_budget: int = tunable(512, 128, 256, 1024, 2048)
    epsilon: float = tunable(1.0, 1.25, 1.5, 2.0)
    """Factor on the predicted TPOT of the virtual batch: room for prompts in the same step."""
    prior_output_tokens: int = 200
    """Expected output of a request before any has finished."""

    def __post_init__(self) -> None:
        check_at_least(1, token_budget=self.token_budget)
        check_positive(epsilon=self.epsilon)
        self.reset()

    def reset(self) -> None:
        self._lengths = OutputLengths(self.prior_output_tokens)
        self._credits: dict[str, float] = {}
        """Credit of each decode by id, kept while the decodes have different TPOTs."""

    def schedule(self, view: SchedulerView) -> SchedulerOutput:
        batch = BatchBuilder(view, token_budget=self.token_budget)
        decodes, begun = split_running(view.running)
        tiers = Counter(r.slo.tpot_s for r in decodes)
        credit_of = self._earned(decodes, tiers)
        chosen = _with_credit(decodes, credit_of, batch.num_free_tokens) if credit_of else decodes
        batch.add_preempting(chosen, victims=list(view.running))
        running = _Running(tiers, sum(r.num_computed_tokens + 1 for r in decodes))
        for request in view.swapped:
            running.add(request)
        may_start = may_start_new(batch, view, begun)
        begun = [r for r in begun if not batch.has_left(r)]
        self._add_prompts(batch, view, running, begun, may_start=may_start)
        if not batch.num_scheduled_tokens and view.running:
            serve_something(batch, view.running)
        if credit_of:
            self._credits = {
                request_id: credit - (request_id in batch.num_scheduled_tokens)
                for request_id, credit in credit_of.items()
            }
        return batch.build()

    def schedule_beside(self, decodes: DecodeGroup, view: SchedulerView) -> SchedulerOutput | None:
        """Plan the rest if all decodes have the same TPOT: then each gets a token in every step."""
        batch = BatchBuilder(view, beside=decodes, token_budget=self.token_budget)
        if batch.num_free_tokens < 0 or len(decodes.num_by_tpot_s) > 1:
            return None
        running = _Running(decodes.num_by_tpot_s, decodes.context_tokens)
        self._add_prompts(batch, view, running, view.running, may_start=True)
        return batch.build()

    def decodes_until_s(self, decodes: DecodeGroup, limits: Limits) -> float:
        if len(decodes.num_by_tpot_s) > 1:
            return -math.inf
        return decodes_until_s(decodes, limits, self.token_budget)

    def _earned(
        self, decodes: Sequence[Request], tiers: Mapping[float, int]
    ) -> dict[str, float] | None:
        """Return each decode's credit after earning; None if all earn the same, so that all run."""
        if len(tiers) <= 1:
            return None
        least_s = min(tiers)
        trps = {tpot_s: _trp(least_s, tpot_s) for tpot_s in tiers}
        known = self._credits
        return {r.request_id: known.get(r.request_id, 0.0) + trps[r.slo.tpot_s] for r in decodes}

    def _add_prompts(
        self,
        batch: BatchBuilder,
        view: SchedulerView,
        running: _Running,
        begun: Sequence[Request],
        *,
        may_start: bool,
    ) -> None:
        model = view.model
        self._lengths.update()
        for request in begun:
            running.add(request)
        prompts = _ttft_guard(batch, view, model, begun)
        if may_start:
            prompts = self._tpot_guard(batch, model, running, prompts)
        else:
            prompts = [r for r in prompts if r.status is RequestStatus.RUNNING]
        add_prefills(batch, prompts, reserved_blocks=batch.blocks_promised(begun))
        for request in prompts:
            if request in batch:
                self._lengths.watch(request)

    def _tpot_guard(
        self,
        batch: BatchBuilder,
        model: LatencyModel,
        running: _Running,
        prompts: Iterable[Request],
    ) -> list[Request]:
        """Return the prompts that may continue or start, as far as the step has tokens for them."""
        allowed: list[Request] = []
        half_output = float(self._lengths.expected_left(0)) / 2
        num_free, num_refused = batch.num_free_tokens, 0
        for request in prompts:
            if num_free <= 0 or num_refused == _MAX_REFUSED:
                break
            if request.status is not RequestStatus.RUNNING:
                was = running.sums
                running.add(request)
                if was.num_requests and not self._keeps_tpot(model, running, half_output):
                    running.restore(request, was)
                    num_refused += 1
                    continue
            allowed.append(request)
            num_free -= request.num_uncomputed_tokens
        return allowed

    def _keeps_tpot(self, model: LatencyModel, running: _Running, half_output: float) -> bool:
        """Tell whether a step of the virtual batch is within the smallest TPOT."""
        least_s = min(running.tiers)
        if least_s == math.inf:
            return True
        num = running.virtual_batch(least_s)
        length = running.sums.context_tokens / running.sums.num_requests + half_output
        shape = BatchShape()
        shape.num_decodes = math.ceil(num - _ROUNDING)
        shape.decode_context_tokens = round(num * length)
        shape.max_context_tokens = shape.max_decode_context_tokens = round(length)
        return self.epsilon * model.predict(shape) <= least_s


class _Sums(NamedTuple):
    num_requests: int
    context_tokens: int


class _Running:
    """Requests that run or may start: their number by TPOT, and the sum of their contexts."""

    def __init__(self, num_by_tpot_s: Mapping[float, int], context_tokens: int) -> None:
        self.tiers = Counter(num_by_tpot_s)
        self.sums = _Sums(self.tiers.total(), context_tokens)

    def add(self, request: Request) -> None:
        self.tiers[request.slo.tpot_s] += 1
        num, context = self.sums
        self.sums = _Sums(num + 1, context + request.num_prompt_tokens + request.num_output_tokens)

    def restore(self, request: Request, sums: _Sums) -> None:
        """Undo the last `add`; `sums` are those from before it."""
        self.tiers[request.slo.tpot_s] -= 1
        if not self.tiers[request.slo.tpot_s]:
            del self.tiers[request.slo.tpot_s]
        self.sums = sums

    def virtual_batch(self, least_s: float) -> float:
        """Return how many of them run in a step, on average (VBS)."""
        # The order is fixed because a sum of floats depends on it.
        tiers = sorted(self.tiers.items())
        return sum(num * _trp(least_s, tpot_s) for tpot_s, num in tiers)


def _trp(least_tpot_s: float, tpot_s: float) -> float:
    """Return the share of the steps that a request needs (TPOT-relative proportionality)."""
    return 1.0 if tpot_s == least_tpot_s else max(least_tpot_s / tpot_s, _LEAST_TRP)


def _with_credit(
    decodes: Sequence[Request], credit_of: Mapping[str, float], most: int
) -> list[Request]:
    """Return the decodes that can pay for a token; if too many, those with the most credit."""
    able = [r for r in decodes if credit_of[r.request_id] >= 1 - _ROUNDING]
    if len(able) <= most:
        return able
    richest = sorted(able, key=lambda r: credit_of[r.request_id], reverse=True)[:most]
    ids = {r.request_id for r in richest}
    return [r for r in able if r.request_id in ids]


def _ttft_guard(
    batch: BatchBuilder, view: SchedulerView, model: LatencyModel, begun: Sequence[Request]
) -> list[Request]:
    """Return the prompts by deadline, and reject those that cannot be in time."""
    predict, end_s = model.predict_prefill, view.now_s
    kept = []
    by_deadline = sorted((*begun, *view.waiting), key=attrgetter("deadline_s"))
    for request in by_deadline[:_MAX_ASKED]:
        known = request.num_prompt_tokens + request.num_output_tokens
        computed = request.num_computed_tokens
        prefill_s = predict(known - computed, computed)
        is_new = request.status is RequestStatus.WAITING and not request.num_output_tokens
        if is_new and end_s + prefill_s > request.deadline_s:
            batch.reject(request, why_late(request, view.now_s))
        else:
            end_s += prefill_s
            kept.append(request)
    return kept
