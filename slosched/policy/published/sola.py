"""SOLA: the one of TTFT and TPOT that is in more danger is optimized, within the other's SLO."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from slosched.batch import BatchBuilder, largest_that_fits
from slosched.core import (
    DecodeGroup,
    ForeseesDecodes,
    LatencyModel,
    Limits,
    Request,
    SchedulerOutput,
    SchedulerView,
    tunable,
)
from slosched.policy.kit.checks import check_at_least
from slosched.policy.kit.decode_first import add_decodes, add_prefills, decodes_until_s
from slosched.policy.kit.drop import Drop, drop_late
from slosched.policy.kit.lengths import Floats

_LEAST_S = 1e-9
"""Least time promised to a token, by which others are divided."""


@dataclass
class SOLA(ForeseesDecodes):
    """Every decode, then prompts: as many as TPOT allows while TTFT is in more danger.

    The state: p_TTFT is the largest share of its TTFT that has passed, over the prompts without a
    token that can still be in time.  p_TPOT is the largest mean time per token so far relative to
    the TPOT, over the decodes.  Prompts are sorted by predicted TTFT / TTFT of the SLO, the largest
    first.

    1. If p_TTFT >= p_TPOT, TTFT is optimized within TPOT: k, the prompt tokens of the step, is the
       largest multiple of `tile_tokens` with which no decode's token becomes late.
    2. If p_TTFT < p_TPOT, TPOT is optimized within TTFT: k is what is left of `token_budget`, and
       prompts are added only while the step makes no prompt that is left out miss its TTFT.

    Source: SOLA (MLSys '25), from two sets of notes on its text; its code was not
    available.  State monitor → `_tpot_ratio` and `_rated`.  The constraint on k,
    max (t_TPOT + C_p / l_out) <= T_TPOT → `_time_limit_s`, which is the same under the run's
    deadline rule `mean_tpot`.  The constraint on n, max (t_TTFT + C_p(run) + C_d(run) + C_p(r)) <=
    T_TTFT → `_pushing_none_out`.  The two cost models → the run's latency model; prompts and
    decodes share a step.

    Where the notes are silent: while TPOT is optimized, k is a budget as in Sarathi.  The
    relaxation to a percentile, for a constraint that cannot be kept, leaves out the prompts that
    cannot be in time any more; these come last.  Left out: the order of decodes (all run), and the
    prediction of peak memory (use `sola+past_future`).  SOLA has no `drop`; it is here so that all
    policies can be compared with the same options.

    The policy uses no output lengths.
    """

    tile_tokens: int = tunable(64, 128, 256)
    token_budget: int = tunable(512, 128, 256, 1024, 2048)
    """Tokens of a step in which TPOT is optimized."""
    drop: Drop = tunable(Drop.NEVER, Drop.EXPIRED, Drop.INFEASIBLE)

    def __post_init__(self) -> None:
        check_at_least(1, token_budget=self.token_budget, tile_tokens=self.tile_tokens)

    def schedule(self, view: SchedulerView) -> SchedulerOutput:
        model = view.model
        batch = BatchBuilder(view)
        view = drop_late(batch, view, self.drop)
        begun, waiting = add_decodes(batch, view)
        prompts = _rated((*begun, *waiting), view.now_s, model)
        if prompts.requests:
            decodes = [r for r in view.running if r.is_decode]
            if prompts.ttft_ratio < _tpot_ratio(decodes, view.now_s):
                num_free = self.token_budget - batch.shape.num_tokens
                batch.num_free_tokens = min(batch.num_free_tokens, num_free)
                chosen = _pushing_none_out(batch, model, prompts)
            else:
                chosen = prompts.requests
                if decodes:
                    limit_s = _time_limit_s(batch, view.now_s, model, decodes)
                    batch.num_free_tokens = self._tokens_within(limit_s, batch, chosen)
            add_prefills(batch, chosen, reserved_blocks=batch.blocks_promised(begun))
        return batch.build()

    def decodes_until_s(self, decodes: DecodeGroup, limits: Limits) -> float:
        return decodes_until_s(decodes, limits, limits.max_num_batched_tokens)

    def _tokens_within(
        self, limit_s: float, batch: BatchBuilder, prompts: Sequence[Request]
    ) -> int:
        """Return k, the prompt tokens for which there is time: all of them, or whole tiles."""
        most = 0
        for request in prompts:
            most = min(most + request.num_uncomputed_tokens, batch.num_free_tokens)
            if most == batch.num_free_tokens:
                break
        prior = prompts[0].num_computed_tokens

        def fits(tokens: int) -> bool:
            return batch.predict_with(tokens, prior) <= limit_s

        if most <= 0 or fits(most):
            return most
        tile = self.tile_tokens
        return tile * largest_that_fits(lambda tiles: fits(tiles * tile), 0, -(-most // tile))


class _Prompts(NamedTuple):
    """Prompts that wait or have begun, in order."""

    requests: list[Request]
    spare_s: Floats
    """Time that each prompt can wait and still be in time; negative if it cannot be."""
    ttft_ratio: float
    """p_TTFT; infinite if none can be in time."""


def _rated(requests: Sequence[Request], now_s: float, model: LatencyModel) -> _Prompts:
    """Sort prompts by predicted TTFT / TTFT, those that cannot be in time last.

    For one that has emitted tokens and is computed again, it is the time to its next token.
    """
    predict = model.predict_prefill
    prefill_s = _floats(
        predict(r.num_prompt_tokens + r.num_output_tokens - (done := r.num_computed_tokens), done)
        for r in requests
    )
    spare_s = _floats(r.deadline_s for r in requests) - now_s - prefill_s
    passed_s = now_s - _floats(map(_waits_from_s, requests))
    promised_s = _floats(r.slo.ttft_s for r in requests)
    is_silent = np.array([not r.num_output_tokens for r in requests], dtype=np.bool_)
    for i in np.flatnonzero(~is_silent).tolist():
        promised_s[i] = max(_LEAST_S, requests[i].deadline_s - _waits_from_s(requests[i]))
    in_time = spare_s >= 0
    ratios = (passed_s / promised_s)[in_time & is_silent]
    ratio = float(ratios.max()) if len(ratios) else math.inf
    order = np.lexsort((-(passed_s + prefill_s) / promised_s, ~in_time))
    return _Prompts([requests[i] for i in order.tolist()], spare_s[order], ratio)


def _waits_from_s(request: Request) -> float:
    """Return the time since which the request waits for its next token.

    A preempted one that has emitted tokens has kept its TTFT or not, and waits since the last one.
    """
    return request.token_times_s[-1] if request.num_output_tokens else request.arrival_s


def _floats(values: Iterable[float]) -> Floats:
    return np.fromiter(values, dtype=np.float64)


def _tpot_ratio(decodes: Sequence[Request], now_s: float) -> float:
    """Return p_TPOT over the decodes that have emitted two tokens or more."""
    return max(
        (
            (now_s - r.token_times_s[0]) / ((r.num_output_tokens - 1) * r.slo.tpot_s)
            for r in decodes
            if r.num_output_tokens > 1
        ),
        default=0.0,
    )


def _pushing_none_out(batch: BatchBuilder, model: LatencyModel, prompts: _Prompts) -> list[Request]:
    """Return the first n prompts; more would make one that is left out miss its TTFT.

    A prompt that cannot even wait for the decodes alone does not count.
    """
    shape, num_free = batch.shape.copy(), batch.num_free_tokens
    spare_s = np.where(prompts.spare_s >= model.predict(shape), prompts.spare_s, math.inf)
    least_from_s = np.append(np.minimum.accumulate(spare_s[::-1])[::-1], math.inf)
    for i, request in enumerate(prompts.requests):
        chunk = min(request.num_uncomputed_tokens, num_free)
        if chunk <= 0:
            return prompts.requests[:i]
        shape.add(chunk, request.num_computed_tokens)
        if model.predict(shape) > least_from_s[i + 1]:
            return prompts.requests[:i]
        num_free -= chunk
    return prompts.requests


def _time_limit_s(
    batch: BatchBuilder, now_s: float, model: LatencyModel, decodes: Sequence[Request]
) -> float:
    """Return the time until the first token is due that can be in time, else the least TPOT."""
    alone_s = model.predict(batch.shape)
    slacks_s = (r.deadline_s - now_s for r in decodes)
    least_tpot_s = min(r.slo.tpot_s for r in decodes)
    return min((slack_s for slack_s in slacks_s if slack_s >= alone_s), default=least_tpot_s)
