"""A client's request on its way through a Ray Serve application, and the beginning of an answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Call:
    """A request as it reaches a replica."""

    method: str
    target: str
    """The path, with the query."""
    headers: Sequence[tuple[str, str]]
    content: bytes
    tried: tuple[str, ...] = ()
    """The addresses of the replicas that did not take it."""

    def after(self, url: str) -> Call:
        """Return the call for another replica than the one at `url`."""
        return replace(self, tried=(*self.tried, url))


@dataclass(frozen=True, slots=True)
class Head:
    """The beginning of an answer; its body follows."""

    url: str
    """The address of the replica that answers."""
    status: int
    headers: Sequence[tuple[bytes, bytes]]
