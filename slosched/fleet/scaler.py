"""Scalers: a scaler decides how many replicas a fleet has, while it serves."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from slosched.core import Request
from slosched.fleet.view import ReplicaKind, ReplicaView
from slosched.policy.kit.checks import check_at_least, check_positive

_DIGITS = 9
"""Means are rounded floats: 11 requests on two replicas, or 5.5 each, are 1.1 times 5."""


@dataclass(frozen=True)
class FleetState:
    """What a scaler sees of a fleet."""

    now_s: float
    replicas: Sequence[ReplicaView]
    """The replicas that take requests; not those that start or drain."""
    num_starting: int
    kind: ReplicaKind
    """What a new replica would be."""
    startup_s: float
    """Time from the decision for a new replica until it takes requests."""

    @property
    def num_replicas(self) -> int:
        """Return the replicas that serve, and those that soon will."""
        return len(self.replicas) + self.num_starting


@dataclass
class Scaler(ABC):
    """A rule that says how many replicas there should be.

    A scaler is a dataclass whose fields are its parameters.  It reads the state that it is shown
    and the requests that it has noted.  It reads no clock and draws no random numbers.
    """

    every_s: float = 15.0
    """Time between two decisions, the first of which is made after it; 15 s as in Kubernetes."""
    hold_s: float = 300.0
    """The fleet has as many replicas as were wanted at most in this time; 5 min as in Kubernetes.

    So it grows at once and shrinks late."""

    def __post_init__(self) -> None:
        check_positive(every_s=self.every_s)
        check_at_least(0, hold_s=self.hold_s)
        self.reset()

    def reset(self) -> None:  # noqa: B027  # some scalers remember nothing
        """Forget everything before a new run."""

    def note_arrival(self, request: Request) -> None:  # noqa: B027  # some count no arrivals
        """Take notice of a request that has just arrived, before it is routed."""

    @abstractmethod
    def num_wanted(self, state: FleetState) -> int:
        """Return how many replicas there should be; the fleet keeps to its own limits."""


def scaled_by_ratio(num_now: int, measured: float, target: float, tolerance: float = 0.1) -> int:
    """Return the replicas with which a mean over `num_now` of them would fall to `target`.

    It is `num_now` as long as the mean is within the share `tolerance` of the target.  Source: the
    Horizontal Pod Autoscaler of Kubernetes, whose tolerance is 0.1.
    """
    ratio = measured / target
    if round(abs(ratio - 1), _DIGITS) <= tolerance:
        return num_now
    return math.ceil(round(num_now * ratio, _DIGITS))
