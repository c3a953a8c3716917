"""Routers: a router decides which replica serves a request, when the request arrives."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from slosched.core import Request
from slosched.fleet.view import ReplicaView


class Router(ABC):
    """A rule that sends each request to one replica.

    A router is a dataclass whose fields are its parameters.  It reads the views that it is shown,
    and may remember what it has sent where.  It reads no clock, and draws random numbers only from
    a seed that is one of its fields.
    """

    def reset(self) -> None:  # noqa: B027  # some routers remember nothing
        """Forget everything before a new run."""

    @abstractmethod
    def route(self, request: Request, replicas: Sequence[ReplicaView]) -> ReplicaView:
        """Return one of `replicas`, which are those that can serve the request, at least one.

        A view costs time only when it is asked.  So a router that asks two of a thousand replicas
        is as fast as one that asks two of four.
        """
