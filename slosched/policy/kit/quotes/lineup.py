"""Prompts that wait, as columns of numbers, for questions about all of them."""

from __future__ import annotations

import math
from array import array
from collections.abc import Collection
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from slosched.policy.kit.quotes.work import NO_WORK, Work

_GONE = (math.nan, math.nan, 0.0, 0.0, 0.0)
"""The numbers of a prompt that waits no longer: no comparison with its place or its time holds."""
_MOST_GONE = 64
"""Such prompts, beyond as many as do wait, before all are left out."""

Floats = np.ndarray[tuple[int], np.dtype[np.float64]]
Columns = np.ndarray[tuple[int, int], np.dtype[np.float64]]
"""A row for each of the numbers below, with a column for each prompt."""


class Waiting(Protocol):
    """A prompt that waits."""

    @property
    def place(self) -> float: ...
    @property
    def due_s(self) -> float: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def work(self) -> Work: ...


class Behind(NamedTuple):
    """A prompt that goes after another one."""

    shared_s: float
    """Its work in full steps."""
    num_tokens: int
    due_s: float


P = TypeVar("P", bound=Waiting)


class Lineup(Generic[P]):
    """The prompts that wait or have begun, by name.

    A question about their work takes O(prompts), as a few operations on arrays instead of a look at
    each object.  While one thread plans, and changes the line-up, others may ask, and put prompts
    that are new.
    """

    def __init__(self) -> None:
        self._prompts: dict[str, P] = {}
        self._new: dict[str, P] = {}
        """Those that have no column yet."""
        self._new_numbers = array("d")
        """The numbers of these, one prompt after the other."""
        self._columns = _empty(_MOST_GONE)
        self._column_of: dict[str, int] = {}
        """The columns of prompts, which are in the order in which they came."""
        self._num_used = 0
        """The columns of prompts, and of prompts that wait no longer."""

    def __contains__(self, name: str) -> bool:
        return name in self._prompts

    def get(self, name: str) -> P | None:
        """Return the prompt of this name, or None."""
        return self._prompts.get(name)

    def all(self) -> Collection[P]:
        """Return all prompts, in the order in which they came."""
        return self._prompts.copy().values()

    def put(self, name: str, prompt: P) -> None:
        """Count a prompt, or what it has become if it is counted already."""
        self._prompts[name] = prompt
        if name in self._new:
            self.settle()
        column = self._column_of.get(name)
        if column is None:
            self._new_numbers.extend(_numbers(prompt))
            self._new[name] = prompt
        else:
            self._columns[:, column] = _numbers(prompt)

    def remove(self, name: str) -> None:
        """Count a prompt no longer, if it is counted; only the thread that plans may."""
        self._prompts.pop(name, None)
        if name in self._new:
            self.settle()
        column = self._column_of.pop(name, None)
        if column is not None:
            self._columns[:, column] = _GONE
            if self._num_used > 2 * len(self._column_of) + _MOST_GONE:
                self._close_up()

    def settle(self) -> None:
        """Make columns of the prompts that are new; only the thread that plans may."""
        # What another thread adds at this moment counts twice, or not, until the next call.
        self._new_numbers = array("d")
        for name, prompt in self._new.copy().items():
            if self._num_used == self._columns.shape[1]:
                self._close_up()
            self._columns[:, self._num_used] = _numbers(prompt)
            self._column_of[name] = self._num_used
            self._num_used += 1
            del self._new[name]

    def ahead(self, place: float, far_s: float) -> Work:
        """Return the work of the prompts up to `place` that are due by `far_s`."""
        if not self._prompts:
            return NO_WORK
        places, dues_s, _, alone_s, shared_s = self._now()
        goes_first = (places <= place) & (dues_s <= far_s)
        return Work(float(alone_s[goes_first].sum()), float(shared_s[goes_first].sum()))

    def by_due(self, place: float, due_s: float, far_s: float) -> tuple[Floats, Floats]:
        """Return the work in full steps of the prompts up to `place`, by when they are due.

        Two arrays: the seconds after `due_s`, first none and then up to `far_s`, at which one of
        them is due, and the work of those due by then.  O(prompts x their logarithm).
        """
        places, dues_s, _, _, shared_s = self._now()
        counts = (places <= place) & (dues_s <= far_s)
        dues_s, shared_s = dues_s[counts], shared_s[counts]
        by_due = np.argsort(dues_s)
        dues_s, until_s = dues_s[by_due], np.concatenate(([0.0], np.cumsum(shared_s[by_due])))
        num_before = int(np.searchsorted(dues_s, due_s, side="right"))
        return np.concatenate(([0.0], dues_s[num_before:] - due_s)), until_s[num_before:]

    def behind(self, place: float, far_s: float, most: int) -> list[Behind]:
        """Return the first prompts behind `place` that are due before `far_s`, at most so many.

        Those of the same place are in the order in which they came.
        """
        now = self._now()
        places, dues_s, *_ = now
        behind = now[:, (places > place) & (dues_s < far_s)]
        first = behind[:, np.argsort(behind[0], kind="stable")[:most]]
        _, due_s, num_tokens, _, shared_s = first.tolist()
        return [Behind(*each) for each in zip(shared_s, map(int, num_tokens), due_s, strict=True)]

    def has_due_before(self, far_s: float) -> bool:
        """Tell whether a prompt is due before `far_s`."""
        return bool((self._now()[1] < far_s).any())

    def shared_s(self, far_s: float) -> float:
        """Return the work in full steps of the prompts that are due before `far_s`."""
        _, dues_s, _, _, shared_s = self._now()
        return float(shared_s[dues_s < far_s].sum())

    def _now(self) -> Columns:
        """Return the columns, with those of new prompts behind the others."""
        columns = self._columns
        if not self._new_numbers:
            return columns
        new = np.frombuffer(self._new_numbers.tobytes())  # which is a copy made in one go
        return np.hstack((columns, new.reshape(-1, len(_GONE)).T))

    def _close_up(self) -> None:
        """Leave out those that wait no longer, and make room for as many again as do wait."""
        num_kept = len(self._column_of)
        columns = _empty(2 * num_kept + _MOST_GONE)
        columns[:, :num_kept] = self._columns[:, list(self._column_of.values())]
        self._columns, self._num_used = columns, num_kept
        self._column_of = {name: column for column, name in enumerate(self._column_of)}


def _numbers(prompt: Waiting) -> tuple[float, float, float, float, float]:
    return prompt.place, prompt.due_s, prompt.num_tokens, *prompt.work


def _empty(num: int) -> Columns:
    return np.repeat(np.array([_GONE]).T, num, axis=1)
