"""How long /health takes beside everything else, and whose fault that is.

A process of its own asks, so that no other client holds it up.  On a busy machine most of a long
wait is spent by threads that could run but have no core.  Linux counts that time for each thread,
and what is left is the server's own.
"""

from __future__ import annotations

import http.client
import math
import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from soak.held import figure
from soak.verdicts import Verdicts, say

_PERIOD_S = 0.05
LONGEST_TURN = "slosched:event_loop_longest_turn_cpu_seconds"


class Probe(NamedTuple):
    """One answer of /health."""

    began_s: float
    took_s: float
    no_core_s: float
    """How long the client or the server's event loop had no core meanwhile."""

    @property
    def own_s(self) -> float:
        """Return the time that the server itself took."""
        return max(0.0, self.took_s - self.no_core_s)


@dataclass
class Health:
    """The probes of a run."""

    probes: list[Probe] = field(default_factory=list)

    def but_in(self, pauses_s: Sequence[tuple[float, float]]) -> Health:
        """Return those probes that did not meet a server whose process stood still.

        It has so long again to catch up with the clients that came meanwhile.
        """
        return Health(
            [
                probe
                for probe in self.probes
                if not any(
                    probe.began_s < 2 * end_s - begin_s and probe.began_s + probe.took_s > begin_s
                    for begin_s, end_s in pauses_s
                )
            ]
        )

    def judge(self, verdicts: Verdicts, limit_s: float, beside: str) -> None:
        """Judge the longest answer, without the time in which there was no core for it."""
        for name in ("took_s", "own_s"):
            waits_s = sorted(getattr(probe, name) for probe in self.probes)
            shares = (0.5, 0.99, 0.999, 1.0)
            found = [1000 * waits_s[int(share * (len(waits_s) - 1))] for share in shares]
            what = "by the clock" if name == "took_s" else "without waits for a core"
            say(
                f"/health, {len(waits_s)} answers, {what}: median {found[0]:.1f} ms, "
                f"p99 {found[1]:.1f} ms, p99.9 {found[2]:.1f} ms, longest {found[3]:.1f} ms"
            )
        longest_s = max(probe.own_s for probe in self.probes)
        promise = f"/health beside {beside}, without waits for a core"
        verdicts.at_most(promise, 1000 * longest_s, 1000 * limit_s, " ms")


def waited_s(pid: int) -> float:
    """Return how long the main thread of a process could have run but had no core, so far."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9


@contextmanager
def watched(url: str, pid: int) -> Iterator[Health]:
    """Probe the server of this process id until the end of the block; then the probes are there."""
    ours, theirs = multiprocessing.Pipe()
    watcher = multiprocessing.get_context("spawn").Process(target=_watch, args=(url, pid, theirs))
    watcher.start()
    ours.recv()
    health = Health()
    try:
        yield health
    finally:
        ours.send("stop")
        health.probes += ours.recv()
        watcher.join()


def _watch(url: str, pid: int, other: Connection) -> None:
    address, found = urlsplit(url), []
    other.send("ready")
    while not other.poll(_PERIOD_S):
        before_s = waited_s(pid) + waited_s(os.getpid())
        began_s = time.monotonic()
        is_well = _is_well(address.netloc)
        took_s = time.monotonic() - began_s if is_well else math.inf
        found.append(Probe(began_s, took_s, waited_s(pid) + waited_s(os.getpid()) - before_s))
    other.send(found)


def _is_well(address: str) -> bool:
    connection = http.client.HTTPConnection(address, timeout=60)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def judge_turns(verdicts: Verdicts, page: str, limit_s: float) -> None:
    """Judge how long one round of the server's event loop may keep others waiting."""
    longest_s = figure(page, LONGEST_TURN)
    promise = "processor time of one round of the server's event loop"
    verdicts.at_most(promise, 1000 * longest_s, 1000 * limit_s, " ms")
