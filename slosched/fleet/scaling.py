"""How many replicas a fleet has over time, and for how long each holds its devices."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from slosched.fleet.scaler import FleetState, Scaler
from slosched.fleet.view import ReplicaKind

DEFAULT_STARTUP_S = 60.0
"""The time that a new replica of a scaled fleet takes to start, if nothing else is said."""


@dataclass(frozen=True)
class Scaling:
    """The scaler of a fleet, and the fewest replicas that it may leave.

    The most replicas are those of the fleet.
    """

    scaler: str
    """The scaler's spec, as `make_scaler` reads it."""
    min_replicas: int

    def check(self, replicas: Sequence[ReplicaKind], startup_s: float) -> None:
        """Raise ValueError if replicas such as these cannot be started and closed like this."""
        most = len(replicas)
        if not 1 <= self.min_replicas <= most:
            raise ValueError(
                f"the fewest replicas of a fleet must be 1 to {most}, the most that it may have, "
                f"not {self.min_replicas}"
            )
        if any(kind != replicas[0] for kind in replicas):
            raise ValueError("a fleet that is scaled has replicas of one kind; these are unequal")
        if startup_s == math.inf:
            raise ValueError("a fleet that is scaled needs a finite start-up time of its replicas")


@dataclass
class Lease:
    """The time for which one replica holds its devices, from its start to its end."""

    index: int
    """The replica's place in the fleet."""
    num_gpus: int
    from_s: float
    """When its start-up begins."""
    ready_s: float
    """When it takes requests, unless it is given up before."""
    closed_s: float | None = None
    """When it takes no more requests, and drains; None if it serves to the end."""
    until_s: float | None = None
    """When its devices are free again; None as long as they are not."""

    @property
    def gpu_s(self) -> float:
        """Return the GPU seconds, with start-up and drain."""
        assert self.until_s is not None, "the replica still holds its devices"
        return self.num_gpus * (self.until_s - self.from_s)


OnLease = Callable[[Lease], None]
"""A function that gets the lease of each replica when a replay has ended."""


class Decisions:
    """The decisions of a scaler, of which the highest of the last `hold_s` seconds holds."""

    def __init__(self, scaler: Scaler, least: int, most: int) -> None:
        """Begin with the fewest replicas; `least` and `most` are the fleet's limits."""
        scaler.reset()
        self.scaler = scaler
        self._least, self._most = least, most
        self._recent: deque[tuple[float, int]] = deque()
        """Decisions that may still hold: each is lower than the one before it."""

    def num_wanted(self, state: FleetState) -> int:
        """Let the scaler decide, and return the number of replicas that there should be."""
        recent, now_s = self._recent, state.now_s
        wanted = min(max(self.scaler.num_wanted(state), self._least), self._most)
        while recent and recent[-1][1] <= wanted:
            recent.pop()
        recent.append((now_s, wanted))
        while recent[0][0] < now_s - self.scaler.hold_s:
            recent.popleft()
        return recent[0][1]
