"""vLLM's running decodes as one group, so that a policy need not look at each of them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cached_property

from slosched.core import KVView, Request


class Members:
    """Decodes that run together for many steps, and the counts of them that stay the same."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self.requests = requests
        self.ids = [request.request_id for request in requests]
        self.have_emitted = 0 not in [request.num_output_tokens for request in requests]
        """Whether each had emitted a token when they were brought together."""
        self.num_by_tpot_s: Mapping[float, int] = Counter([r.slo.tpot_s for r in requests])
        self._num_by: dict[Callable[[Request], Hashable], Mapping[Hashable, int]] = {}

    def num_by(self, key: Callable[[Request], Hashable]) -> Mapping[Hashable, int]:
        """Return the number of members for each value of `key`."""
        num_by = self._num_by.get(key)
        if num_by is None:
            num_by = self._num_by[key] = Counter(map(key, self.requests))
        return num_by


class RunningDecodes:
    """The decodes of one step, each of which gets one token; a `DecodeGroup`.

    vLLM's side updates every request in every step, so the sums are made anew, each when it is
    first asked for.
    """

    def __init__(self, members: Members, kv: KVView, *, are_oldest: bool) -> None:
        self._members = members
        self._kv = kv
        self.are_oldest = are_oldest
        self._num_prior = [request.num_computed_tokens for request in members.requests]
        self.num_decodes = len(self._num_prior)
        self.context_tokens = sum(self._num_prior) + self.num_decodes
        self.max_context_tokens = max(self._num_prior, default=-1) + 1

    @property
    def num_by_tpot_s(self) -> Mapping[float, int]:
        return self._members.num_by_tpot_s

    def num_by(self, key: Callable[[Request], Hashable]) -> Mapping[Hashable, int]:
        return self._members.num_by(key)

    @cached_property
    def num_new_blocks(self) -> int:
        ids, size = self._members.ids, self._kv.block_size
        # Of all others the last block has room.
        full = [(ids[at], num) for at, num in enumerate(self._num_prior) if not num % size]
        num_held = self._kv.num_held_blocks
        return sum([size * num_held(request_id) <= num for request_id, num in full])

    @cached_property
    def output_tokens(self) -> int:
        return sum([request.num_output_tokens for request in self._members.requests])

    @cached_property
    def _deadlines_s(self) -> Sequence[float]:
        return [request.deadline_s for request in self._members.requests]

    @property
    def first_deadline_s(self) -> float:
        return min(self._deadlines_s, default=math.inf)

    @property
    def last_deadline_s(self) -> float:
        return max(self._deadlines_s, default=-math.inf)

    def first_deadline_from(self, tpot_s: float) -> float:
        if tpot_s <= min(self.num_by_tpot_s, default=math.inf):
            return self.first_deadline_s
        due_s = [r.deadline_s for r in self._members.requests if r.slo.tpot_s >= tpot_s]
        return min(due_s, default=math.inf)
