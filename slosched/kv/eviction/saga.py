"""SAGA's order: recency, the chance that a session goes on, and size, in one weighted sum."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from slosched.core import Request
from slosched.kv.eviction.lines import Line
from slosched.kv.eviction.order import EvictionOrder, Known, Rank, awaited
from slosched.kv.eviction.pauses import Pauses

_RECENCY, _REUSE, _SIZE = 0.3, 0.5, 0.2
"""Weights of the authors' own implementation."""
_LONGEST_SHARE = 0.95
"""The share of the pauses that are shorter than what a session is waited for."""
_PATIENCE = 1.1
"""Factor on that pause, so that sessions whose pauses are all alike come back within it."""
_FIRST_LONGEST_S = 30.0
"""That time before any pause was seen."""
_MOST_TURNS = 64
"""Turns of a session after which all are counted together."""


class _Waited(NamedTuple):
    """A line, and the time at which it lost its last user."""

    line: Line
    left_s: float


class Saga(EvictionOrder):
    """Evicts first where 0.3 * recency + 0.5 * (1 - chance of a return) + 0.2 * size is highest.

    Recency is the time that a line has been idle, over the pause that one in twenty exceeds; what
    has been idle for longer goes before all else, as in LRU.  The chance of a return is the share
    that came back of the lines that had been used as often.  Size is a line's share of
    the KV cache, so that of two alike the one goes that makes more room.

    Source: workflow-aware LRU of SAGA (arXiv 2605.00528), of which the abstract and the description
    of the order in the authors' repository were read: the three terms, their weights, and that a
    wait for a tool ends at a percentile of such waits.  There, the chance comes from a graph of the
    agent's steps, which names its tools; no tool is known here, so the steps of the graph are the
    turns of a session, and all pauses are of one kind.  SAGA's batches by session, its prefetch and
    its fairness are not affairs of the cache.
    """

    def __init__(self, known: Known) -> None:
        """Begin without knowledge of sessions."""
        self._num_blocks = known.num_blocks
        self._pauses = Pauses()
        self._waited: deque[_Waited] = deque()
        """Lines that may still come back, in the order in which they were left."""
        self._returned = [0] * _MOST_TURNS
        """Lines that came back, by how often they had done so before."""
        self._gone = [0] * _MOST_TURNS
        """Lines that did not within the time for which they were waited."""

    def note_arrived(self, path: Sequence[Line], now_s: float) -> None:
        self._give_up(now_s)
        self._pauses.note_arrived(path, now_s)
        for line in path:
            if not line.users and line.left_number:
                self._returned[_turns(line.num_gaps - 1)] += 1

    def note_ended(self, request: Request, path: Sequence[Line], now_s: float) -> None:  # noqa: ARG002
        self._give_up(now_s)
        self._waited.extend(_Waited(line, now_s) for line in path if not line.users)

    def rank(self, line: Line, now_s: float) -> Rank:
        if line.users:
            return awaited(line)
        longest_s = self._longest_s()
        ends_s = line.left_s + longest_s
        if ends_s <= now_s:
            return Rank((0.0, float(line.left_number)))
        size = (line.stop - line.start) / self._num_blocks
        # All lines grow older by the same, so that the sum can be told as a later time of leaving.
        later_s = longest_s * (_REUSE * self._chance(line) - _SIZE * size) / _RECENCY
        return Rank((1.0, line.left_s + later_s), until_s=ends_s)

    def _chance(self, line: Line) -> float:
        """Return the chance that a line comes back once more.

        Where few came as far, it is that of all that came back at least once, or of new ones.
        """
        turns = _turns(line.num_gaps)
        alike = slice(1, None) if turns else slice(0, 1)
        returned, gone = sum(self._returned[alike]), sum(self._gone[alike])
        share = (returned + 1) / (returned + gone + 2)
        returned, gone = self._returned[turns], self._gone[turns]
        return (returned + share) / (returned + gone + 1)

    def _give_up(self, now_s: float) -> None:
        """Count the lines as gone for which nobody waits any longer."""
        given_up_s = now_s - self._longest_s()
        while self._waited and self._waited[0].left_s <= given_up_s:
            line, left_s = self._waited.popleft()
            if not line.users and line.left_s == left_s:
                self._gone[_turns(line.num_gaps)] += 1

    def _longest_s(self) -> float:
        """Return the time for which a session is waited."""
        pauses_s = self._pauses.in_order_s
        if not pauses_s:
            return _FIRST_LONGEST_S
        return max(1e-6, _PATIENCE * pauses_s[int(_LONGEST_SHARE * (len(pauses_s) - 1))])


def _turns(num_gaps: int) -> int:
    return min(num_gaps, _MOST_TURNS - 1)
