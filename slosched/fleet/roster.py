"""The replicas of a running fleet: which of them start, serve and drain."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from slosched.core import Request
from slosched.fleet.scaling import Lease
from slosched.fleet.view import ReplicaKind, ReplicaView


class Roster:
    """Starts replicas, closes them, and keeps the lease of each.

    A fleet has as many places as it may have replicas at most, and a replica holds its place from
    the begin of its start-up until its last request has ended.
    """

    def __init__(
        self, replicas: Sequence[ReplicaKind], make: Callable[[int], ReplicaView], num_up: int
    ) -> None:
        """Begin with replicas on the first `num_up` places that take requests at once.

        `make` returns the view of a new replica on a place.
        """
        self._replicas, self._make = replicas, make
        self._starting: list[Lease] = []
        self._draining: list[ReplicaView] = []
        self._leases: list[Lease] = []
        self._lease_of: dict[ReplicaView, Lease] = {}
        self.up: list[ReplicaView] = []
        """The views of all replicas that take requests, in the order of their places."""
        for index in range(num_up):
            self.start(index, 0.0, 0.0)
        self.open_ready(0.0)

    @property
    def running(self) -> list[ReplicaView]:
        """Return the views of all replicas that may have requests, with those that drain."""
        return [*self.up, *self._draining]

    @property
    def num_starting(self) -> int:
        """Return the replicas that are about to take requests."""
        return len(self._starting)

    def start(self, index: int, now_s: float, ready_s: float) -> None:
        """Let a replica start on a free place."""
        lease = Lease(index, self._replicas[index].num_gpus, now_s, ready_s)
        self._starting.append(lease)
        self._leases.append(lease)

    def open_ready(self, now_s: float) -> None:
        """Let all replicas take requests whose start-up is over."""
        for lease in [lease for lease in self._starting if lease.ready_s <= now_s]:
            self._starting.remove(lease)
            view = self._make(lease.index)
            self.up.append(view)
            self._lease_of[view] = lease
        self.up.sort(key=lambda view: view.index)

    def fail(self, index: int, now_s: float) -> list[Request]:
        """Let the replica on a place fail; return the requests that it loses.

        Nothing happens to a place on which no replica runs.
        """
        self._release_idle()
        view = next((view for view in self.running if view.index == index), None)
        if view is None:
            return []
        (self.up if view in self.up else self._draining).remove(view)
        lost = view.fail()
        self._end(view, now_s)
        return lost

    def resize(self, num_wanted: int, now_s: float, ready_s: float) -> None:
        """Start or close replicas until as many serve or start as are wanted.

        Those that start are given up first, the last one first, and then those are closed that have
        the fewest requests.  New ones need a free place, so a fleet may stay smaller for a while.
        """
        self._release_idle()
        for _ in range(len(self.up) + len(self._starting) - num_wanted):
            if self._starting:
                lease = self._starting.pop()
                lease.closed_s = lease.until_s = now_s
            else:
                self._close(now_s)
        taken = {view.index for view in self.running} | {lease.index for lease in self._starting}
        free = [index for index in range(len(self._replicas)) if index not in taken]
        for index in free[: max(0, num_wanted - len(self.up) - len(self._starting))]:
            self.start(index, now_s, ready_s)

    def end(self, end_s: float) -> list[Lease]:
        """Return the leases of all replicas that ever were, in the order in which they began.

        All requests have ended, the last one at `end_s`, and then the fleet ends.
        """
        for view in self._draining:
            self._end(view, view.idle_from_s())
        for lease in self._leases:
            lease.until_s = end_s if lease.until_s is None else min(lease.until_s, end_s)
        return [lease for lease in self._leases if lease.from_s < end_s]

    def _close(self, now_s: float) -> None:
        """Let the replica drain that has the fewest requests; of equals, the last one."""
        view = min(self.up, key=lambda view: (view.num_requests, -view.index))
        self.up.remove(view)
        self._draining.append(view)
        self._lease_of[view].closed_s = now_s
        self._release_idle()

    def _release_idle(self) -> None:
        """End the leases of those drained replicas whose requests have all ended by now."""
        for view in [view for view in self._draining if view.is_idle]:
            self._draining.remove(view)
            self._end(view, view.idle_from_s())

    def _end(self, view: ReplicaView, end_s: float) -> None:
        """Note that a replica's devices are free from `end_s` on, but not before it was closed."""
        lease = self._lease_of.pop(view)
        if lease.closed_s is None:
            lease.closed_s = end_s
        lease.until_s = max(lease.closed_s, end_s)
