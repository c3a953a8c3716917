"""SLOs-Serve's dynamic program: the new requests to admit so that most are served in time.

Source: SLOs-Serve (arXiv 2504.08784) and its first code (`promax_spec_sch.cc` at c9dbc0d).
The program goes through the requests in order of their prefill deadlines.  A state is the cost of
one set of requests taken so far.  The authors' state is (profit, memory, prefill budget left) for
each number of requests in each TPOT tier.  Here the budget is the time used of the bank, and a tier
is its tokens and steps per second.  A request can be taken if the bank holds the time of its prompt
when it is due, if enough is left for all admitted requests, if it fits into steps of the smallest
TPOT with all other decodes, and if KV cache and seats suffice.  As in the authors' program, new
decodes never end.
"""

from __future__ import annotations

import numpy as np

from slosched.policy.kit.lengths import Floats
from slosched.policy.published.slosserve.promised_load import Room

_KEPT_OF_A_NUMBER = 4
"""States that are kept for each number of requests: those that use the least time.

This bounds the cost.  One is enough if all have the same TPOT and memory is no limit.
"""
_NUM, _USED_S, _KV_TOKENS, _TOKENS_PER_S, _STEPS_PER_S, _TAKEN = range(6)
"""Rows of the states; the set of taken requests is a sum of powers of two."""


def best_subset(room: Room, new: Floats) -> list[int]:
    """Return the indices, in order, of the most requests that can be taken.

    Of sets of the same size the one that uses the least time is returned.  `new` are 1 to 50
    columns of `PromisedLoad` in order of their deadlines.  O(n³).
    """
    states = np.zeros((6, 1))
    states[_STEPS_PER_S] = room.steps_per_s
    at_s = 0.0
    for i, due_s in enumerate(new[0]):
        states = _passed(room, states, at_s, due_s)
        taking = _taking(room, states, new[:, i], i)
        states = _undominated(np.concatenate((states, taking), axis=1))
        at_s = due_s
    states = _passed(room, states, at_s, np.inf)
    best = np.lexsort((states[_USED_S], -states[_NUM]))[0]
    taken = int(states[_TAKEN, best])
    return [i for i in range(new.shape[1]) if taken >> i & 1]


def _passed(room: Room, states: Floats, from_s: float, to_s: float) -> Floats:
    """Return the states at `to_s`, without those that made an admitted prompt late on the way."""
    share = _share(room, states)
    here = (room.promised_at_s >= from_s) & (room.promised_at_s < to_s)
    until_s = room.promised_at_s[here] - from_s
    used_s = states[_USED_S, :, np.newaxis] + share[:, np.newaxis] * until_s
    is_kept = np.all(used_s <= room.promised_room_s[here], axis=1)
    if to_s < np.inf:
        states[_USED_S] += share * (to_s - from_s)
    return states[:, is_kept]


def _taking(room: Room, states: Floats, request: Floats, i: int) -> Floats:
    """Return the states that take request `i` as well, where that is possible."""
    _, _, begin_s, end_s, tokens_per_s, context, tpot_s, num, in_full_steps_s = request
    states = states.copy()
    states[_NUM] += num
    states[_USED_S] += in_full_steps_s
    states[_KV_TOKENS] += context + tokens_per_s * (end_s - begin_s)
    states[_TOKENS_PER_S] += tokens_per_s
    states[_STEPS_PER_S] = np.maximum(states[_STEPS_PER_S], 1 / tpot_s)
    states[_TAKEN] += 2.0**i
    can_take = (
        (states[_USED_S] <= room.banked_s[i])
        & (_share(room, states) <= room.free_share[i])
        & (states[_KV_TOKENS] <= room.num_free_kv_tokens)
        & (states[_NUM] <= room.num_free_seats[i])
    )
    return states[:, can_take]


def _share(room: Room, states: Floats) -> Floats:
    """Return the share of time that the decodes of the taken requests need."""
    more_steps_per_s = states[_STEPS_PER_S] - room.steps_per_s
    share: Floats = room.decode_s * states[_TOKENS_PER_S] + room.step_s * more_steps_per_s
    return share


def _undominated(states: Floats) -> Floats:
    """Drop states that take no more requests than another and use no less; keep few per number."""
    states = states[:, np.lexsort((states[_USED_S], -states[_NUM]))]
    num, costs = states[_NUM], states[_USED_S:_TAKEN]
    no_worse = num[:, np.newaxis] >= num
    for cost in costs:
        no_worse &= cost[:, np.newaxis] <= cost
    # Sorted, of two that are equal the first stays.
    states = states[:, ~np.triu(no_worse, 1).any(axis=0)]
    first_of_number = np.searchsorted(-states[_NUM], -states[_NUM], side="left")
    rank = np.arange(states.shape[1]) - first_of_number
    return states[:, rank < _KEPT_OF_A_NUMBER]
