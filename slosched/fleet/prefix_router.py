"""Routers that take the replica of the least cost, and remember which prefixes they sent where."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from slosched.core import Request
from slosched.fleet.prefixes import SentPrefixes
from slosched.fleet.router import R, Replica, Router


class PrefixRouter(Router):
    """Sends each request to the replica of the least `cost`, of equal ones to the first.

    It hears nothing from the engines' caches, and goes by what it has sent where (`SentPrefixes`).
    A subclass is a dataclass, too, and writes `cost`.
    """

    uses_prefixes: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._prefixes = SentPrefixes()

    @abstractmethod
    def cost(self, request: Request, replica: Replica, num_cached_tokens: int) -> Any:
        """Return what a replica costs that has cached so many tokens of the prompt.

        It is a number, or a tuple of numbers of which the first that differ decide.
        """

    def route(self, request: Request, replicas: Sequence[R]) -> R:
        def cost(replica: R) -> Any:
            return self.cost(request, replica, self._prefixes.num_cached_tokens(request, replica))

        chosen = min(replicas, key=cost)
        self._prefixes.note(request, chosen)
        return chosen
