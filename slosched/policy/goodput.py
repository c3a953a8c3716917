"""Our own: whoever can still be in time, in the order that keeps the most promises."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappush, heappushpop
from itertools import compress
from operator import attrgetter, not_

from slosched.batch import BatchBuilder
from slosched.core import (
    DecodeGroup,
    EndReason,
    Limits,
    Policy,
    Request,
    RequestStatus,
    SchedulerOutput,
    SchedulerView,
    tunable,
)
from slosched.policy._decode_first import add_decodes
from slosched.policy._drop import without_rejected

_TILE_TOKENS = 64
"""Rows of a matrix kernel's tile: a chunk that fills part of one pays for all of it."""
_MAX_ASKED = 512
"""Waiting prompts that a step looks at, the most urgent: a bound on its cost in deep overload."""

Timed = tuple[Request, float]
"""A prompt, and how long what is left of its prefill takes alone on the device."""


@dataclass
class Goodput(Policy):
    """Every decode, then the prompts that can be in time, in the time that decodes leave.

    1. Reject the requests without a token that would miss their TTFT even alone on the device.
    2. Order the prompts that wait or have begun by Moore and Hodgson's rule, which makes the most
       jobs punctual on one machine: in order of deadline, and whenever one would be late, the
       longest so far goes behind all others (it is looked at anew in every step).  Prefills share
       the device with decodes, so each is taken to last its own time divided by the share that
       decodes leave: 1 - (time of a step of decodes alone) x (steps/s that their TPOTs ask for).
    3. A step may last until the first decode is due, less `margin`, and always has time for a
       chunk of `floor_tokens`.
    4. Add prompts in that order; the first that has to be cut ends with a whole tile of 64.

    Source: algorithm g of our own study (reference/goodput-study.md, section 10).  Moore (1968),
    https://doi.org/10.1287/mnsc.15.1.102.  Left out of g: the projection of KV growth and the cap
    on utilisation, which changed nothing there; the correction of the model's bias is the
    `OnlineModel`'s.  Output lengths are not known to it.
    """

    margin: float = tunable(0.05, 0.0, 0.1)
    """Share of the time limit that is left unused, against predictions that are too low."""
    floor_tokens: int = tunable(128, 64, 256)
    """A step has time for a chunk of this size, however little slack there is."""
    min_share: float = 0.1
    """Share of the device that prefills are planned with at least."""

    def __post_init__(self) -> None:
        if self.floor_tokens < 1:
            raise ValueError(f"floor_tokens must be at least 1, not {self.floor_tokens}")
        if not 0 <= self.margin < 1:
            raise ValueError(f"margin must be in [0, 1), not {self.margin}")
        if not 0 < self.min_share <= 1:
            raise ValueError(f"min_share must be in (0, 1], not {self.min_share}")

    def schedule(self, view: SchedulerView) -> SchedulerOutput:
        batch = BatchBuilder(view)
        begun = _reject_hopeless(batch, view, (r for r in view.running if not r.is_decode))
        waiting = _reject_hopeless(batch, view, _most_urgent(view.waiting))
        view = without_rejected(batch, view)
        decodes = [r for r in view.running if r.is_decode]
        first_s = min((r.deadline_s for r in decodes), default=math.inf)
        num_by_tpot_s = Counter(r.slo.tpot_s for r in decodes)
        _, may_start = add_decodes(batch, view)
        begun = [timed for timed in begun if not batch.has_left(timed[0])]
        self._add_prefills(batch, view, first_s, num_by_tpot_s, begun, waiting if may_start else [])
        return batch.build()

    def schedule_beside(self, decodes: DecodeGroup, view: SchedulerView) -> SchedulerOutput | None:
        batch = BatchBuilder(view, beside=decodes)
        if batch.num_free_tokens < 0:
            return None
        begun = _reject_hopeless(batch, view, view.running)
        waiting = _reject_hopeless(batch, view, _most_urgent(view.waiting))
        first_s, num_by_tpot_s = decodes.first_deadline_s, decodes.num_by_tpot_s
        self._add_prefills(batch, view, first_s, num_by_tpot_s, begun, waiting)
        return batch.build()

    def decodes_until_s(self, decodes: DecodeGroup, limits: Limits) -> float:
        return math.inf if decodes.num_decodes <= limits.max_num_batched_tokens else -math.inf

    def _add_prefills(
        self,
        batch: BatchBuilder,
        view: SchedulerView,
        first_deadline_s: float,
        num_by_tpot_s: Mapping[float, int],
        begun: list[Timed],
        waiting: list[Timed],
    ) -> None:
        model = view.latency_model
        if model is None or not (begun or waiting):
            return
        decodes_s = model.predict(batch.shape)
        share = max(self.min_share, 1 - decodes_s * _steps_per_s(num_by_tpot_s))
        ordered = most_in_time(begun + waiting, view.now_s + decodes_s, share)
        least = batch.shape.copy()
        least.add(self.floor_tokens, 0)
        slack_s = (1 - self.margin) * (first_deadline_s - view.now_s)
        batch.time_limit_s = max(slack_s, math.nextafter(model.predict(least), math.inf))
        reserved = batch.blocks_promised(request for request, _ in begun)
        _pack(batch, ordered, reserved_blocks=reserved)


def _steps_per_s(num_by_tpot_s: Mapping[float, int]) -> float:
    """How often a step must run for all decodes, on average over them."""
    num_decodes = sum(num_by_tpot_s.values())
    # In a fixed order: sums of floats depend on it.
    tokens_per_s = sum(num / tpot_s for tpot_s, num in sorted(num_by_tpot_s.items()))
    return tokens_per_s / num_decodes if num_decodes else 0.0


def _most_urgent(waiting: Sequence[Request]) -> Sequence[Request]:
    if len(waiting) <= _MAX_ASKED:
        return waiting
    return sorted(waiting, key=attrgetter("deadline_s"))[:_MAX_ASKED]


def _reject_hopeless(
    batch: BatchBuilder, view: SchedulerView, prefills: Iterable[Request]
) -> list[Timed]:
    """The others, each with the time that its prefill takes alone on the device."""
    if view.latency_model is None:
        raise ValueError("goodput predicts every batch: give the scheduler a latency model")
    predict, now_s = view.latency_model.predict_prefill, view.now_s
    timed = []
    for request in prefills:
        out, computed = request.num_output_tokens, request.num_computed_tokens
        alone_s = predict(request.num_prompt_tokens + out - computed, computed)
        slack_s = request.deadline_s - now_s
        if alone_s <= slack_s or out:
            timed.append((request, alone_s))
        else:
            reason = EndReason.EXPIRED if slack_s < 0 else EndReason.INFEASIBLE
            batch.reject(request, reason)
    return timed


def most_in_time(prefills: Iterable[Timed], start_s: float, share: float) -> list[Request]:
    """Moore and Hodgson: by deadline those that can all be in time, then the late ones.

    They run one after the other from `start_s` on, with `share` of the device.  O(n log n).
    """
    by_deadline = sorted(prefills, key=lambda timed: timed[0].deadline_s)
    end_s = start_s
    kept: list[tuple[float, int]] = []
    is_late = [False] * len(by_deadline)
    for i, (request, alone_s) in enumerate(by_deadline):
        prefill_s = alone_s / share
        if end_s + prefill_s <= request.deadline_s:
            heappush(kept, (-prefill_s, i))
            end_s += prefill_s
        else:
            longest_s, longest = heappushpop(kept, (-prefill_s, i))
            end_s += prefill_s + longest_s
            is_late[longest] = True
    ordered = [request for request, _ in by_deadline]
    in_time = compress(ordered, map(not_, is_late))
    return [*in_time, *compress(ordered, is_late)]


def _pack(batch: BatchBuilder, ordered: Sequence[Request], reserved_blocks: int) -> None:
    """In order; the first waiting request without room in the KV cache keeps those behind out."""
    blocked = False
    for request in ordered:
        if batch.num_free_tokens <= 0:
            break
        if request.status is RequestStatus.RUNNING:
            reserved_blocks -= batch.blocks_promised((request,))
        elif blocked or batch.num_free_seqs <= 0:
            continue
        elif not batch.fits_whole(request, reserved_blocks):
            blocked = True
            continue
        n = batch.largest_chunk(request)
        if n < request.num_uncomputed_tokens:
            beyond = (batch.shape.num_tokens + n) % _TILE_TOKENS
            batch.add(request, n - beyond if n > beyond else n)
            break
        batch.add(request)
        reserved_blocks += batch.blocks_promised((request,))
