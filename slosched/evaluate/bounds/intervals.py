"""Intervals of a period that is repeated without end, and what has to be done inside of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from slosched.evaluate.bounds.prices import FloatArray
from slosched.evaluate.bounds.program import IntArray, Program

_MOST_ROUNDS = 25
_CUTS_A_ROUND = 6
"""The intervals that are added for each set of prices in a round, at most."""
_TOLERANCE = 0.002
"""The share by which an interval may be overfull; a smaller one takes rounds that change little."""


@dataclass(frozen=True)
class Jobs:
    """Work that is due some time after it is released, in marks of time.  Arrays have one shape."""

    released: IntArray
    """The mark in which the work is released, within the period."""
    due: IntArray
    """The mark in which it is due, which may lie in a later period."""
    owner: IntArray
    """The request whose work it is."""
    work_s: FloatArray


@dataclass(frozen=True)
class Load:
    """All jobs at one set of prices, and the price of a step."""

    jobs: Jobs
    per_step_s: float


class Intervals:
    """The rows of a program by which work and steps fit into intervals of whole marks.

    A row is added where a solution puts more into an interval than there is time.  Rows that are
    not added leave the bound looser, never wrong.
    """

    def __init__(
        self,
        program: Program,
        good: IntArray,
        steps: IntArray,
        loads: Sequence[Load],
        mark_s: float,
        num_marks: int,
    ) -> None:
        """Prepare for a period of `num_marks` marks, into which the slots of `steps` are grouped.

        The number of slots has to be a multiple of that of the marks.
        """
        self._program, self._good = program, good
        self._steps = steps.reshape(num_marks, -1)
        self._loads, self._mark_s, self._num_marks = loads, mark_s, num_marks
        self._known: set[tuple[int, int, int]] = set()
        length = np.arange(1, num_marks + 1)[None, :]
        self._begin = np.arange(num_marks)[:, None]
        self._end = self._begin + length
        self._limit_s = (1 + _TOLERANCE) * length * mark_s

    def most_good(self) -> float:
        """Return the program's optimum once no interval is overfull, or after some rounds."""
        for _ in range(_MOST_ROUNDS):
            solved = self._program.solve()
            good = solved.values[self._good]
            steps = solved.values[self._steps].sum(axis=1)
            cuts = {
                (i, *cut) for i in range(len(self._loads)) for cut in self._full(i, good, steps)
            }
            if not cuts - self._known:
                break
            for cut in sorted(cuts - self._known):
                self._limit(*cut)
        return solved.value

    def _full(self, load: int, good: FloatArray, steps: FloatArray) -> Iterator[tuple[int, int]]:
        """Yield begin and length of the most overfull intervals, at most one for each begin."""
        num, jobs = self._num_marks, self._loads[load].jobs
        work_s = np.zeros((2 * num, 2 * num))
        # An interval that goes beyond the period's end meets the work of the next period.
        for shift in (0, num):
            inside = jobs.due + shift < 2 * num
            at = (jobs.released[inside] + shift, jobs.due[inside] + shift)
            np.add.at(work_s, at, good[jobs.owner[inside]] * jobs.work_s[inside])
        from_begin_s = np.cumsum(work_s[::-1], axis=0)[::-1][:num]  # what begins in the period
        work_s = np.cumsum(from_begin_s, axis=1)
        before = np.concatenate([[0.0], np.cumsum(np.tile(steps, 2))])
        begin, end = self._begin, self._end
        step_s = self._loads[load].per_step_s * (before[end] - before[begin])
        excess_s = work_s[begin, end - 1] + step_s - self._limit_s
        longest = excess_s.argmax(axis=1)
        most_s = excess_s.max(axis=1)
        for a in np.argsort(-most_s)[:_CUTS_A_ROUND]:
            if most_s[a] > 0:
                yield int(a), int(longest[a]) + 1

    def _limit(self, load: int, begin: int, length: int) -> None:
        """Add that what must be done in an interval fits into it, next to its steps."""
        self._known.add((load, begin, length))
        jobs, program = self._loads[load].jobs, self._program
        (row,) = program.rows(1, length * self._mark_s)
        after = (jobs.released - begin) % self._num_marks
        inside = after + jobs.due - jobs.released < length
        owners = self._good[jobs.owner[inside]]
        program.add(np.full_like(owners, row), owners, jobs.work_s[inside])
        marks = (begin + np.arange(length)) % self._num_marks
        steps = self._steps[marks].ravel()
        program.add(np.full_like(steps, row), steps, self._loads[load].per_step_s)
