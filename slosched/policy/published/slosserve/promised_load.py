"""A check whether all admitted requests can meet their SLOs to the end, as sums over a sweep.

Source: SLOs-Serve (arXiv 2504.08784; `csrc/adm_ctrl_scheduler.cc`).  A request demands its whole
prompt by the deadline of its first token, and then a token every TPOT until its expected end.
Between two events (a decode begins or ends) the decodes leave the same share of every step unused.
That time is put into a bank, and prompts have to be paid from the bank by the time they are due.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from slosched.batch import largest_that_fits
from slosched.core import BatchShape, LatencyModel, Request, RequestStatus, SchedulerView
from slosched.policy.kit.lengths import Floats, OutputLengths

_MAX_DECODES = 64
"""Decodes that are looked at one by one; it bounds the cost of a sweep."""


class PromisedLoad:
    """The admitted requests; `add` refuses requests that would make one of them miss its SLO.

    All times are seconds from now.  Requests that are late already are part of the load, but no
    reason to refuse another one.  Requests without a deadline are not part of it.
    """

    def __init__(
        self,
        view: SchedulerView,
        model: LatencyModel,
        lengths: OutputLengths,
        decodes: Sequence[Request],
        prompts: Sequence[Request],
        *,
        margin: float,
    ) -> None:
        self._view = view
        self._model = model
        self._lengths = lengths
        self._margin = margin
        self._ledger = view.kv.ledger()
        self._own_share = _own_share(view)
        promised = [r for r in prompts if r.deadline_s < math.inf]
        self._columns = self._decode_columns(decodes)
        load = (*decodes, *promised)
        self._decode_cost_s = _decode_cost_s(model, len(load), sum([r.num_tokens for r in load]))
        if promised:
            columns = (self._columns, self.columns_of(promised))
            self._columns = np.concatenate(columns, axis=1)
        self._sweep = _Sweep(self._columns, *self._decode_cost_s, margin)

    def columns_of(self, prompts: Sequence[Request]) -> Floats:
        """Return the figures of prompts that a load works with, shape (9, prompts).

        The rows are due time, prefill time alone, start and end of the decode (s), tokens per
        second, context (tokens) that it shares with no other, TPOT (s), the number of requests, and
        the time that the prefill takes of full steps (s).
        """
        predict = self._model.predict_prefill
        due_s = np.array([r.deadline_s for r in prompts], dtype=np.float64) - self._view.now_s
        work_s = np.array(
            [predict(r.num_uncomputed_tokens, r.num_computed_tokens) for r in prompts],
            dtype=np.float64,
        )
        context = np.array([self._own_tokens(r) for r in prompts], dtype=np.float64)
        tpot_s, lasts_s = self._pace(prompts)
        begin_s = np.maximum(due_s, 0.0)
        one = np.ones(len(prompts))
        net_s = self._in_full_steps_s(prompts, work_s, self._full_step_tokens(tpot_s))
        rows = (due_s, work_s, begin_s, begin_s + lasts_s, 1 / tpot_s, context, tpot_s, one, net_s)
        return np.concatenate(rows).reshape(len(rows), -1)

    def _own_tokens(self, request: Request) -> float:
        """Return the tokens of a request that take KV cache which no other request takes anyway."""
        num_tokens, num_computed = request.num_tokens, request.num_computed_tokens
        if request.status is RequestStatus.WAITING:
            ready = self._ledger.num_ready_blocks(request.request_id) * self._view.kv.block_size
            return num_tokens - min(ready, num_computed)
        if request.status is RequestStatus.RUNNING:
            return num_tokens - (1 - self._own_share) * num_computed
        return num_tokens

    def _full_step_tokens(self, tpot_s: Floats) -> int:
        """Return the tokens of a step as long as the smallest TPOT, also of `tpot_s`."""
        least_s = float(tpot_s.min(initial=self._columns[6].min(initial=math.inf)))
        most = self._view.limits.max_num_batched_tokens
        predict = self._model.predict_prefill
        if predict(most) <= least_s:
            return most
        return largest_that_fits(lambda num: predict(num) <= least_s, 1, most)

    def _in_full_steps_s(
        self, prompts: Sequence[Request], alone_s: Floats, full_tokens: int
    ) -> Floats:
        """Return what each prompt adds to steps of `full_tokens`, whose constant is paid already.

        Alone, a short prompt takes the time in which the weights are read, and its tokens may cost
        nothing, or as much as all prompts of a step together.  So tokens that do not fill a step
        cost what they cost in a full one.  Attention to a part that is computed already comes on
        top.
        """
        predict, (step_s, _) = self._model.predict_prefill, self._decode_cost_s
        token_s = max(0.0, predict(full_tokens) - step_s) / full_tokens
        added_s = []
        for request, each_s in zip(prompts, alone_s.tolist(), strict=True):
            tokens = request.num_uncomputed_tokens
            if tokens >= full_tokens:
                added_s.append(max(0.0, each_s - step_s))
                continue
            attention_s = each_s - predict(tokens) if request.num_computed_tokens else 0.0
            added_s.append(tokens * token_s + attention_s)
        return np.array(added_s, dtype=np.float64)

    def _decode_columns(self, decodes: Sequence[Request]) -> Floats:
        """Return the same for decodes; if there are many, each of a sample stands for several."""
        sample = decodes[:: max(1, -(-len(decodes) // _MAX_DECODES))]
        weight = np.full(len(sample), len(decodes) / max(1, len(sample)))
        context = np.array([self._own_tokens(r) for r in sample], dtype=np.float64)
        tpot_s, lasts_s = self._pace(sample)
        now_s = np.zeros(len(sample))
        rate = weight / tpot_s
        rows = (now_s, now_s, now_s, lasts_s, rate, context * weight, tpot_s, weight, now_s)
        return np.concatenate(rows).reshape(len(rows), -1)

    def _pace(self, requests: Sequence[Request]) -> tuple[Floats, Floats]:
        """Return the TPOT of each, and how long it will emit tokens: 0 if it has no TPOT."""
        emitted = np.array([r.num_output_tokens for r in requests], dtype=np.float64)
        most_left = np.array([r.max_tokens for r in requests], dtype=np.float64) - emitted
        left = np.minimum(self._lengths.expected_left(emitted), most_left)
        tpot_s = np.array([r.slo.tpot_s for r in requests], dtype=np.float64)
        return tpot_s, left * np.where(tpot_s < math.inf, tpot_s, 0.0)

    def room_beside(self, new: Floats) -> Room:
        """Return what this load leaves for `new` requests (columns in order of their deadlines)."""
        sweep, kv = self._sweep, self._view.kv
        due_s, end_s = new[0], new[3]
        seats = self._view.limits.max_num_seqs - sweep.num_active_after(due_s)
        return Room(
            sweep.room_s(due_s),
            *sweep.promises_from(due_s[0]),
            np.array([sweep.least_free_share(*times) for times in zip(due_s, end_s, strict=True)]),
            seats,
            kv.num_blocks * kv.block_size - sweep.grows_to_tokens.sum(),
            1 / self._columns[6].min() if self._columns.shape[1] else 0.0,
            *self._decode_cost_s,
        )

    def has_room(self, columns: Floats) -> list[bool]:
        """Tell for each whether it is in time alone and the bank holds enough for its prompt.

        The others have to be refused whatever else is added.  This costs a fraction of `add`.
        """
        due_s, work_s = columns[:2]
        fits = self._sweep.room_s(due_s) >= columns[8]
        has_room: list[bool] = (fits & (due_s >= work_s)).tolist()
        return has_room

    def add(self, new: Floats) -> bool:
        """Add requests of these columns if the load stays feasible; else leave it as it was."""
        num_new = new.shape[1]
        columns = np.concatenate((self._columns, new), axis=1)
        sweep = _Sweep(columns, *self._decode_cost_s, self._margin)
        was_late = np.zeros(columns.shape[1], dtype=np.bool_)
        was_late[:-num_new] = self._sweep.surplus_s < 0
        kv = self._view.kv
        if (
            np.any((sweep.surplus_s < 0) & ~was_late)
            or sweep.is_overloaded_by_last(num_new)
            or sweep.outgrows_by_last(num_new, kv.num_blocks * kv.block_size)
            or sweep.most_seats_of_last(num_new) > self._view.limits.max_num_seqs
        ):
            return False
        self._columns, self._sweep = columns, sweep
        return True


class Room(NamedTuple):
    """Time, seats and KV cache that a load leaves for new requests; times in seconds."""

    banked_s: Floats
    """Time in the bank when each new request is due."""
    promised_at_s: Floats
    """Due times of the load's prompts that are not late, from the first new request on."""
    promised_room_s: Floats
    """Time in the bank at `promised_at_s`."""
    free_share: Floats
    """Smallest free share of a step while each new request emits tokens."""
    num_free_seats: Floats
    """Free seats when each new request is due."""
    num_free_kv_tokens: float
    """Free tokens of the KV cache once all requests of the load have reached their ends."""
    steps_per_s: float
    """Steps per second that the load's smallest TPOT asks for; 0 if the load is empty."""
    step_s: float
    """Time of a step without its decodes."""
    decode_s: float
    """Time that each decode adds to a step."""


def _own_share(view: SchedulerView) -> float:
    """Return the blocks that running requests hold, divided by their sum over the requests.

    It is below 1 if they share blocks: those of a cached prefix, or of a prompt with several
    answers.
    """
    kv = view.kv
    num_held = sum([kv.num_held_blocks(r.request_id) for r in view.running])
    num_taken = kv.num_blocks - kv.num_free_blocks
    return num_taken / num_held if num_taken < num_held else 1.0


def _decode_cost_s(
    model: LatencyModel, num_requests: int, context_tokens: int
) -> tuple[float, float]:
    """Return the seconds of a step without its decodes, and of each decode in it."""
    num = max(2, num_requests)
    mean_context = round(context_tokens / num_requests) if num_requests else 1
    one_s, all_s = (model.predict(_decodes(n, mean_context)) for n in (1, num))
    each_s = max(0.0, (all_s - one_s) / (num - 1))
    return max(0.0, one_s - each_s), each_s


def _decodes(num: int, context_tokens: int) -> BatchShape:
    """Return the shape of a step of so many decodes, each of this context length."""
    shape = BatchShape()
    shape.num_decodes = num
    shape.decode_context_tokens = num * context_tokens
    shape.max_context_tokens = shape.max_decode_context_tokens = context_tokens
    return shape


class _Sweep:
    """The events of a load in order of time, and the decodes that are active between them."""

    def __init__(self, columns: Floats, step_s: float, decode_s: float, margin: float) -> None:
        self._due_s, work_s, self._begin_s, self._end_s = columns[:4]
        self._rate, self._context, tpot_s, self._num, net_s = columns[4:]
        times_s = np.concatenate(([0.0], self._begin_s, self._end_s))
        self._order = np.argsort(times_s)
        self._times_s = times_s[self._order]
        self._gaps_s = self._times_s[1:] - self._times_s[:-1]
        self._tokens_per_s = self._running_sum(self._rate)
        """Tokens per second of all decodes that are active from each event to the next."""
        fixed_share = step_s / tpot_s.min() if len(tpot_s) else 0.0
        self._free_share = 1 - margin - fixed_share - decode_s * self._tokens_per_s
        """Share of time that prompts get from each event to the next."""
        self._bank_share = np.maximum(self._free_share, 0.0)
        banked_s = np.cumsum(self._bank_share[:-1] * self._gaps_s)
        self._banked_s = np.concatenate(([0.0], banked_s))
        prompts = np.flatnonzero(work_s > 0)
        prompts = prompts[np.argsort(self._due_s[prompts], kind="stable")]
        self._prompts_due_s = self._due_s[prompts]
        self._owed_s = np.concatenate(([0.0], np.cumsum(net_s[prompts])))
        self.surplus_s = np.full(len(self._due_s), math.inf)
        """Time left in the bank when each prompt is due; infinite for a decode."""
        self._prompts_surplus_s = self._bank_at(self._prompts_due_s) - self._owed_s[1:]
        self.surplus_s[prompts] = self._prompts_surplus_s

    def room_s(self, due_s: Floats) -> Floats:
        """Return the time in the bank at `due_s` that prompts due by then do not need."""
        num_due = np.searchsorted(self._prompts_due_s, due_s, side="right")
        return self._bank_at(due_s) - self._owed_s[num_due]

    def is_overloaded_by_last(self, num: int) -> bool:
        """Tell whether decodes exceed their TPOT while one of the last `num` requests is active."""
        if self._free_share.min() >= 0:
            return False
        begin_s, end_s = self._begin_s[-num:].min(), self._end_s[-num:].max()
        active = (self._times_s >= begin_s) & (self._times_s < end_s)
        return bool(np.any(self._free_share[active] < 0))

    def outgrows_by_last(self, num: int, num_kv_tokens: int) -> bool:
        """Tell whether the KV cache overflows before the last `num` requests have ended."""
        if self.grows_to_tokens.sum() <= num_kv_tokens:
            return False
        grown = self._tokens_per_s * self._times_s - self._running_sum(self._rate * self._begin_s)
        ends = np.concatenate(([0.0], np.zeros(len(self._context)), self._context))
        held = self._context.sum() - np.cumsum(ends[self._order])
        # A peak is just before an event: what was active until then, grown up to it.
        peaks = (held + grown)[:-1] + self._tokens_per_s[:-1] * self._gaps_s
        before_end = self._times_s[1:] <= self._end_s[-num:].max()
        return bool(np.any(peaks[before_end] > num_kv_tokens * (1 + 1e-9)))

    @property
    def grows_to_tokens(self) -> Floats:
        """Return the KV cache of each request when it ends, in tokens."""
        grown: Floats = self._rate * (self._end_s - self._begin_s) + self._context
        return grown

    def most_seats_of_last(self, num: int) -> float:
        """Return the most seats taken when one of the last `num` requests is due, with its own."""
        return float(self.num_active_after(self._due_s[-num:]).max())

    def num_active_after(self, at_s: Floats) -> Floats:
        """Return the seats that are taken after each of these times."""
        num: Floats = (self._end_s > at_s[:, np.newaxis]) @ self._num
        return num

    def promises_from(self, at_s: float) -> tuple[Floats, Floats]:
        """Return due times from `at_s` on of prompts that are not late, and the time left then."""
        kept = (self._prompts_due_s >= at_s) & (self._prompts_surplus_s >= 0)
        return self._prompts_due_s[kept], self._prompts_surplus_s[kept]

    def least_free_share(self, begin_s: float, end_s: float) -> float:
        """Return the least share of a step that decodes leave between these times."""
        first = np.searchsorted(self._times_s, begin_s, side="right") - 1
        last = np.searchsorted(self._times_s, end_s, side="left")
        return float(self._free_share[first : max(last, first + 1)].min())

    def _bank_at(self, at_s: Floats) -> Floats:
        """Return the time put into the bank until each of these times."""
        beyond_s = np.maximum(at_s - self._times_s[-1], 0.0)
        banked_s = np.interp(at_s, self._times_s, self._banked_s)
        until_s: Floats = banked_s + beyond_s * self._bank_share[-1]
        return until_s

    def _running_sum(self, weights: Floats) -> Floats:
        """Return for each event the sum of the weights of the decodes that are active then."""
        changes: Floats = np.concatenate(([0.0], weights, -weights))
        return np.cumsum(changes[self._order])
