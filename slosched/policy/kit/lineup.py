"""Prompts that wait, as columns of numbers, for questions about all of them."""

from __future__ import annotations

import math
from collections.abc import Collection
from threading import Lock
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from slosched.policy.kit.work import NO_WORK, Work

_NUM_COLUMNS = 5
_PLACE, _DUE_S, _NUM_TOKENS, _, _SHARED_S = range(_NUM_COLUMNS)
_GONE = math.nan
"""What is kept of a prompt that waits no longer: no comparison with it is true."""
_MOST_GONE = 64
"""Such prompts, beyond as many as do wait, before all are left out."""


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
    each object.  Any thread may ask and change the line-up.
    """

    def __init__(self) -> None:
        self._numbers = np.full((_NUM_COLUMNS, _MOST_GONE), _GONE)
        """A column of numbers for each of the above, with a place in it for each prompt."""
        self._prompts: dict[str, P] = {}
        self._at: dict[str, int] = {}
        """The place of each prompt; they are in the order in which they came."""
        self._num_used = 0
        """Places of prompts, and those of prompts that wait no longer among them."""
        self._lock = Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {name: each for name, each in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=Lock())

    def __contains__(self, name: str) -> bool:
        return name in self._prompts

    def get(self, name: str) -> P | None:
        """Return the prompt of this name, or None."""
        return self._prompts.get(name)

    def all(self) -> Collection[P]:
        """Return all prompts, in the order in which they came."""
        with self._lock:
            return self._prompts.copy().values()

    def put(self, name: str, prompt: P) -> None:
        """Count a prompt, or what it has become if it is counted already."""
        with self._lock:
            self._prompts[name] = prompt
            at = self._at.get(name)
            if at is None:
                if self._num_used == self._numbers.shape[1]:
                    self._close_up()
                at = self._at[name] = self._num_used
                self._num_used += 1
            self._numbers[:, at] = (prompt.place, prompt.due_s, prompt.num_tokens, *prompt.work)

    def remove(self, name: str) -> None:
        """Count a prompt no longer, if it is counted."""
        with self._lock:
            at = self._at.pop(name, None)
            if at is None:
                return
            del self._prompts[name]
            self._numbers[:, at] = _GONE
            if self._num_used > 2 * len(self._at) + _MOST_GONE:
                self._close_up()

    def ahead(self, place: float, far_s: float) -> Work:
        """Return the work of the prompts up to `place` that are due by `far_s`."""
        with self._lock:
            if not self._at:
                return NO_WORK
            places, dues_s, _, alone_s, shared_s = self._numbers[:, : self._num_used]
            goes_first = (places <= place) & (dues_s <= far_s)
            return Work(float(alone_s[goes_first].sum()), float(shared_s[goes_first].sum()))

    def behind(self, place: float, far_s: float, most: int) -> list[Behind]:
        """Return the first prompts behind `place` that are due before `far_s`, at most so many.

        Those of the same place are in the order in which they came.
        """
        with self._lock:
            numbers = self._numbers[:, : self._num_used]
            are_behind = (numbers[_PLACE] > place) & (numbers[_DUE_S] < far_s)
            behind = numbers[:, are_behind]
        first = behind[:, np.argsort(behind[_PLACE], kind="stable")[:most]].tolist()
        columns = first[_SHARED_S], first[_NUM_TOKENS], first[_DUE_S]
        return [Behind(each_s, int(n), due_s) for each_s, n, due_s in zip(*columns, strict=True)]

    def shared_s(self, far_s: float) -> float:
        """Return the work in full steps of the prompts that are due before `far_s`."""
        with self._lock:
            _, dues_s, _, _, shared_s = self._numbers[:, : self._num_used]
            return float(shared_s[dues_s < far_s].sum())

    def _close_up(self) -> None:
        """Leave out those that wait no longer, and make room for as many again as do wait."""
        kept = self._numbers[:, list(self._at.values())]
        self._num_used = len(self._at)
        self._numbers = np.full((_NUM_COLUMNS, 2 * self._num_used + _MOST_GONE), _GONE)
        self._numbers[:, : self._num_used] = kept
        self._at = {name: at for at, name in enumerate(self._at)}
