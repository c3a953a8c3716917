"""Running decodes as one group: a step that serves all of them costs no more than one of them.

Each member gets a token in every step, so nothing is written to its request until it leaves. Then
its token times are a slice of the steps' times, and its context has grown by the number of steps.
What a step has to know is kept as sums and heaps, which change only as members join and leave.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import TypeVar

from slosched.core import DeadlineRule, Request
from slosched.kv import KVCache

_Key = TypeVar("_Key", bound=Hashable)


@dataclass(slots=True, eq=False)
class Member:
    """A decode of the group, which takes part in the steps [start_step, end_step)."""

    request: Request
    """The request in its state of `start_step`, until `_book` updates it."""
    start_step: int
    end_step: int


class GroupedDecodes:
    """The decodes of a simulated replica; a `DecodeGroup`.

    Steps are counted from the group's creation.  The caller knows how long outputs are and so when
    a member finishes; one whose client goes away leaves before.
    """

    def __init__(self, kv: KVCache, rule: DeadlineRule) -> None:
        self.num_decodes = 0
        self.context_tokens = 0
        self.max_context_tokens = 0
        self.output_tokens = 0
        self._num_by_tpot_s: Counter[float] = Counter()
        self._num_by: dict[Callable[[Request], Hashable], Counter[Hashable]] = {}
        self.are_oldest = True
        self._kv = kv
        self._rule = rule
        self._block_size = kv.block_size
        self._times_s: list[float] = []
        self._members: dict[str, Member] = {}
        self._ending: dict[int, list[Member]] = {}
        """Members by their last step."""
        self._num_filling = [0] * kv.block_size
        """Members by the step, modulo block size, in which each needs another KV block."""
        self._longest: list[tuple[int, int]] = []
        """Heap of (number of steps minus context at joining, end), also of members that left."""
        self._due = _Deadlines(rule)
        self._last_due: _Deadlines | None = None
        """The latest deadline, once it was asked for."""

    def join(self, request: Request, num_tokens_left: int) -> None:
        """Add a running decode that has emitted a token and has `num_tokens_left` to emit."""
        step = len(self._times_s)
        member = Member(request, step, step + num_tokens_left)
        self._members[request.request_id] = member
        self._ending.setdefault(member.end_step, []).append(member)
        context = request.num_computed_tokens + 1
        self.num_decodes += 1
        self._num_by_tpot_s[request.slo.tpot_s] += 1
        for key, num_by in self._num_by.items():
            num_by[key(request)] += 1
        self.context_tokens += context
        self.output_tokens += request.num_output_tokens
        if context > self.max_context_tokens:
            self.max_context_tokens = context
        self._num_filling[(step - request.num_computed_tokens) % self._block_size] += 1
        self._enter(member)

    def __contains__(self, request: Request) -> bool:
        return request.request_id in self._members

    def leave(self, request: Request) -> None:
        """Remove a member in the middle of a step, which computes its token but emits none."""
        member = self._members[request.request_id]
        ending = self._ending[member.end_step]
        ending.remove(member)
        if not ending:
            del self._ending[member.end_step]
        self._remove(member)
        request.num_computed_tokens += 1
        self._kv.grow_lent(request.request_id, request.num_computed_tokens)
        self._longest.clear()
        self._due, self._last_due = _Deadlines(self._rule), None
        for other in self._members.values():
            self._enter(other)
        self._find_longest()

    @property
    def num_new_blocks(self) -> int:
        return self._num_filling[len(self._times_s) % self._block_size]

    @property
    def num_by_tpot_s(self) -> Mapping[float, int]:
        return self._num_by_tpot_s

    def num_by(self, key: Callable[[Request], Hashable]) -> Mapping[Hashable, int]:
        num_by = self._num_by.get(key)
        if num_by is None:
            num_by = Counter(key(member.request) for member in self._members.values())
            self._num_by[key] = num_by
        return num_by

    @property
    def first_deadline_s(self) -> float:
        return self._due.first_s(self._times_s)

    def first_deadline_from(self, tpot_s: float) -> float:
        return self._due.first_s(self._times_s, tpot_s)

    @property
    def last_deadline_s(self) -> float:
        if self._last_due is None:
            self._last_due = _Deadlines(self._rule, latest=True)
            for member in self._members.values():
                self._last_due.add(member.request, member.start_step, member.end_step)
        return self._last_due.first_s(self._times_s)

    @property
    def num_steps_to_end(self) -> int:
        """Return the number of steps after which the first member finishes."""
        return min(self._ending) - len(self._times_s)

    def num_new_blocks_of(self, num_steps: int) -> int:
        """Return the number of free KV blocks that this step and those after it take."""
        num_rounds, num_left = divmod(num_steps, self._block_size)
        first = len(self._times_s) % self._block_size
        filling = self._num_filling
        num_blocks = num_rounds * self.num_decodes + sum(filling[first : first + num_left])
        beyond = first + num_left - self._block_size
        return num_blocks + sum(filling[:beyond]) if beyond > 0 else num_blocks

    def take_blocks(self) -> bool:
        """Take the KV blocks that this step needs; return False if too few are free."""
        num_blocks = self._num_filling[len(self._times_s) % self._block_size]
        if num_blocks:
            if num_blocks > self._kv.num_free_blocks:
                return False
            self._kv.lend(num_blocks)
        return True

    def advance(self, ends_s: Sequence[float]) -> Sequence[Request]:
        """End at least one step of at least one member; return the requests that thereby leave.

        `ends_s` are the times at which the steps end.  No member finishes before the last of them.
        """
        times_s = self._times_s
        times_s += ends_s
        self.context_tokens += self.num_decodes * len(ends_s)
        self.output_tokens += self.num_decodes * len(ends_s)
        self.max_context_tokens += len(ends_s)
        if len(times_s) not in self._ending:
            return ()
        leaving = self._ending.pop(len(times_s))
        for member in leaving:
            self._remove(member)
        self._find_longest()
        return [member.request for member in leaving]

    def book_all(self) -> None:
        """Update the requests of all members; the group must not be used after that."""
        for member in self._members.values():
            self._book(member)

    def _enter(self, member: Member) -> None:
        """Add a member to those of which the longest and the most urgent are known."""
        request, step = member.request, member.start_step
        heappush(self._longest, (step - request.num_computed_tokens - 1, member.end_step))
        self._due.add(request, step, member.end_step)
        if self._last_due is not None:
            self._last_due.add(request, step, member.end_step)

    def _remove(self, member: Member) -> None:
        request = member.request
        del self._members[request.request_id]
        residue = (member.start_step - request.num_computed_tokens) % self._block_size
        self._num_filling[residue] -= 1
        self._book(member)
        self.num_decodes -= 1
        _take_one(self._num_by_tpot_s, request.slo.tpot_s)
        for key, num_by in self._num_by.items():
            _take_one(num_by, key(request))
        self.context_tokens -= request.num_computed_tokens + 1
        self.output_tokens -= request.num_output_tokens

    def _find_longest(self) -> None:
        step, heap = len(self._times_s), self._longest
        while heap and heap[0][1] <= step:
            heappop(heap)
        self.max_context_tokens = step - heap[0][0] if heap else 0

    def _book(self, member: Member) -> None:
        """Update the request for all steps since it joined; the simulated token ids are zeros."""
        request, times_s = member.request, self._times_s[member.start_step :]
        num_steps = len(times_s)
        if num_steps:
            request.num_computed_tokens += num_steps
            request.num_output_tokens += num_steps
            request.output_token_ids += [0] * num_steps
            request.token_times_s += times_s
            request.deadline_s = self._rule.next_deadline_s(request)
            self._kv.grow_lent(request.request_id, request.num_computed_tokens)


def _take_one(counter: Counter[_Key], key: _Key) -> None:
    counter[key] -= 1
    if not counter[key]:
        del counter[key]


class _Deadlines:
    """The earliest deadline of all members; with every step each one moves by its TPOT."""

    def __init__(self, rule: DeadlineRule, *, latest: bool = False) -> None:
        """Look for the earliest deadline, or for the latest one."""
        self._rule = rule
        self._sign = -1 if latest else 1
        """With -1, deadlines are compared as if time ran backwards."""
        self._first_s: dict[float, float] = {}
        """For each TPOT the first deadline, times the sign, of the members that joined before the
        first step."""
        self._heaps: dict[float, list[tuple[float, int, float, int]]] = {}
        """For each TPOT a heap of (deadline as if at step 0, times the sign, end, anchor, tokens
        out minus steps)."""

    def add(self, request: Request, step: int, end_step: int) -> None:
        tpot_s, ahead = request.slo.tpot_s, request.num_output_tokens - step
        due_s = self._sign * request.deadline_s
        self._first_s[tpot_s] = min(self._first_s.get(tpot_s, math.inf), due_s)
        anchor_s = 0.0 if self._rule is DeadlineRule.TBT else self._rule.anchor_s(request)
        at_0_s = anchor_s + ahead * tpot_s if tpot_s < math.inf else math.inf
        entry = self._sign * at_0_s, end_step, anchor_s, ahead
        heappush(self._heaps.setdefault(tpot_s, []), entry)

    def first_s(self, times_s: list[float], least_tpot_s: float = 0.0) -> float:
        """Return the first deadline after the steps that ended at `times_s`.

        Members with a TPOT below `least_tpot_s` do not count.
        """
        step, sign = len(times_s), self._sign
        if not step:
            due_s = (first_s for tpot_s, first_s in self._first_s.items() if tpot_s >= least_tpot_s)
            return sign * min(due_s, default=math.inf)
        first_s = math.inf
        for tpot_s, heap in self._heaps.items():
            if tpot_s < least_tpot_s:
                continue
            while heap and heap[0][1] <= step:
                heappop(heap)
            if heap:
                _, _, anchor_s, ahead = heap[0]
                if self._rule is DeadlineRule.TBT:
                    anchor_s, ahead = times_s[-1], 1 - step
                first_s = min(first_s, sign * (anchor_s + (ahead + step) * tpot_s))
        return sign * first_s
