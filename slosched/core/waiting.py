"""What a plan asks about all that wait, so that it need not look at each of a thousand requests."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from operator import attrgetter

from slosched.core.request import Request


class WaitingRequests(Sequence[Request]):
    """Waiting requests that are kept by length and by deadline, too."""

    @property
    @abstractmethod
    def longest_tokens(self) -> int:
        """Return a number of prompt and output tokens that none of them exceeds."""

    @abstractmethod
    def due_by(self, until_s: float) -> list[Request]:
        """Return those whose deadline is `until_s` or earlier, by deadline."""

    def latest_first(self) -> Iterable[Request]:
        """Return them all, the one that has arrived last first."""
        return reversed(self)


def longest_tokens(waiting: Sequence[Request]) -> int:
    """Return a number of prompt and output tokens that no request exceeds; 0 if there is none."""
    if isinstance(waiting, WaitingRequests):
        return waiting.longest_tokens
    return max((request.num_tokens for request in waiting), default=0)


def due_by(waiting: Sequence[Request], until_s: float) -> list[Request]:
    """Return the requests whose deadline is `until_s` or earlier, by deadline."""
    if isinstance(waiting, WaitingRequests):
        return waiting.due_by(until_s)
    return sorted([r for r in waiting if r.deadline_s <= until_s], key=attrgetter("deadline_s"))


def latest_first(waiting: Sequence[Request]) -> Iterable[Request]:
    """Return the requests, the one that has arrived last first."""
    return waiting.latest_first() if isinstance(waiting, WaitingRequests) else reversed(waiting)
