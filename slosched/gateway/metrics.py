"""The gateway's own counts, for Prometheus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum

from slosched.engine.server.prometheus import labels_of, sample, samples
from slosched.gateway.replica import LiveReplica


class End(StrEnum):
    """How a request ended, as its client saw it.  Each request ends once."""

    ANSWERED = "answered"
    """A replica answered with success."""
    REFUSED = "refused"
    """A replica answered with an error of the client's, such as 400 or 429."""
    SHED = "shed"
    """The router answered 429, since every replica would be late."""
    FAILED = "failed"
    """A replica answered with an error of its own, broke off, or there was none."""
    GONE = "client_gone"
    """The client went away."""
    CUT = "cut_short"
    """The router stopped before the answer was complete."""

    @classmethod
    def of_status(cls, status: int) -> End:
        """Return the end of a request that got a complete answer with this status."""
        if status < 400:
            return cls.ANSWERED
        return cls.REFUSED if status < 500 else cls.FAILED


class GatewayMetrics:
    """Counts of one gateway since it started."""

    def __init__(self, replicas: Sequence[LiveReplica]) -> None:
        self._replicas = replicas
        self.ended: Counter[End] = Counter()
        """Requests by their end."""
        self.sent: Counter[LiveReplica] = Counter()
        """Requests by the replicas that they were sent to; one that moves counts at each."""
        self.failed: Counter[LiveReplica] = Counter()
        """Requests that a replica did not take, or whose answer broke off."""
        self.moved: Counter[LiveReplica] = Counter()
        """Requests that went on to another replica after this one."""

    def lines(self) -> Iterator[str]:
        replicas = self._replicas
        ends = {labels_of(end=end.value): float(self.ended[end]) for end in End}
        yield from samples(
            "slosched:route_requests_ended_total", "counter", "Requests, by their end.", ends
        )
        counters = (
            ("requests", "Requests sent to a replica, those that moved at each.", self.sent),
            ("failures", "Requests that a replica did not take, or broke off.", self.failed),
            ("retries", "Requests that went on to another replica.", self.moved),
        )
        for name, text, counts in counters:
            values = {labels_of(replica=each.url): float(counts[each]) for each in replicas}
            yield from samples(f"slosched:route_{name}_total", "counter", text, values)
        gauges: tuple[tuple[str, str, Callable[[LiveReplica], float]], ...] = (
            ("in_flight", "Requests of this router at a replica.", lambda r: r.num_in_flight),
            ("replica_requests", "Requests that a replica has, of others, too.", _num_requests),
            ("replica_up", "1 while requests are sent to a replica.", lambda r: r.is_up),
            ("state_age_seconds", "Time since a replica told its state.", lambda r: r.age_s),
        )
        for name, text, value in gauges:
            values = {labels_of(replica=each.url): float(value(each)) for each in replicas}
            yield from samples(f"slosched:route_{name}", "gauge", text, values)
        running = sum(each.num_in_flight for each in replicas)
        text = "Requests that replicas are answering."
        yield from sample("slosched:route_requests_running", "gauge", text, "", running)


def _num_requests(replica: LiveReplica) -> float:
    return replica.num_requests
