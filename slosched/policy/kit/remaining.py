"""Waiting requests without some of them, at no cost for the thousand others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from typing import overload

from slosched.core import Request, WaitingRequests, due_by, latest_first, longest_tokens


class Remaining(WaitingRequests):
    """Waiting requests without those that a step rejects or holds back.

    A thousand may wait, and most steps look at none of them or at the first ones only.  So they are
    copied only when one in the middle is asked for.
    """

    __slots__ = ("_all", "_kept", "_left_out")

    def __init__(self, requests: Sequence[Request], left_out: Set[str]) -> None:
        """Leave out the requests with these ids, each of which is among `requests` or left out."""
        if isinstance(requests, Remaining):
            left_out = left_out | requests._left_out
            requests = requests._all
        self._all: Sequence[Request] = requests
        self._left_out: Set[str] = left_out
        self._kept: tuple[Request, ...] | None = None

    @property
    def longest_tokens(self) -> int:
        return longest_tokens(self._all)

    def due_by(self, until_s: float) -> list[Request]:
        return list(self._without(due_by(self._all, until_s)))

    def latest_first(self) -> Iterable[Request]:
        return self._without(latest_first(self._all))

    def __iter__(self) -> Iterator[Request]:
        return self._without(self._all)

    def __reversed__(self) -> Iterator[Request]:
        return self._without(reversed(self._all))

    def __len__(self) -> int:
        return len(self._all) - len(self._left_out)

    @overload
    def __getitem__(self, index: int) -> Request: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Request, ...]: ...
    def __getitem__(self, index: int | slice) -> Request | tuple[Request, ...]:
        if self._kept is None:
            self._kept = tuple(self)
        return self._kept[index]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({[r.request_id for r in self]})"

    def _without(self, requests: Iterable[Request]) -> Iterator[Request]:
        left_out = self._left_out
        return (r for r in requests if r.request_id not in left_out)
