"""Prompts that wait, as columns, for many questions about the same ones."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import numpy as np

from slosched.policy.kit.work import Work, sum_of


class Waiting(Protocol):
    """A prompt that waits."""

    @property
    def place(self) -> float: ...
    @property
    def work(self) -> Work: ...
    @property
    def due_s(self) -> float: ...


class Lineup:
    """The work that goes before a prompt, of those that wait now and those that are added later.

    A question takes O(prompts), as one operation on arrays instead of a look at each object.
    """

    def __init__(self, prompts: Iterable[Waiting]) -> None:
        waiting = tuple(prompts)
        self._places = np.array([each.place for each in waiting])
        self._dues_s = np.array([each.due_s for each in waiting])
        self._works_s = np.array([each.work for each in waiting]).reshape(-1, 2)
        self._added: list[Waiting] = []

    def add(self, prompt: Waiting) -> None:
        """Count a prompt that waits from now on."""
        self._added.append(prompt)

    def ahead(self, place: float, far_s: float) -> Work:
        """Return the work of the prompts up to `place` that are due by `far_s`."""
        goes_first = (self._places <= place) & (self._dues_s <= far_s)
        waiting = Work(*self._works_s[goes_first].sum(axis=0).tolist())
        added = [p.work for p in self._added.copy() if p.place <= place and p.due_s <= far_s]
        return sum_of([waiting, *added])
