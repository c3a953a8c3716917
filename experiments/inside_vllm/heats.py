"""Heats: the same requests to several servers, at once on an emulated device, else in turns."""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import Executor
from dataclasses import dataclass

from experiments.inside_vllm.server import Server
from experiments.inside_vllm.setups import RULE, Setup, System
from slosched.metrics import RequestRecord, Summary, summarize
from slosched.replay.client import ReplayOptions, ReplayReport, replay
from slosched.workload import Trace

Row = dict[str, object]

_OPTIONS = ReplayOptions(num_warmup=1, drain_timeout_s=180.0)


@dataclass(frozen=True)
class Heat:
    """One part of the trace at one rate, for all systems."""

    setup: Setup
    rate: float
    window: int


def heats_to_run(setup: Setup, num_parts: int | None = None) -> list[Heat]:
    """Return the first parts of the trace at every rate; by default as many as the setup plays."""
    return _heats(setup, range(num_parts or setup.num_parts))


def heats_to_tune(setup: Setup, num_parts: int | None = None) -> list[Heat]:
    """Return the parts of the trace at every rate that tune vLLM's own scheduler."""
    first = setup.first_tuning_part
    return _heats(setup, range(first, first + (num_parts or setup.num_tuning_parts)))


def _heats(setup: Setup, parts: range) -> list[Heat]:
    return [Heat(setup, rate, part) for part in parts for rate in reversed(setup.rates)]


def run(heat: Heat, servers: Mapping[System, Server], clients: Executor) -> list[Row]:
    """Return a row for each system; each has its own process of `clients`, to delay no other."""
    trace = heat.setup.load(heat.rate, heat.window)
    if heat.setup.is_emulated:
        started = [_Run(heat, s, server, trace, clients) for s, server in servers.items()]
        return [each.row() for each in started]
    # The system that is first in one heat is last in the next.
    turn = heat.window % len(servers)
    order = [*servers.items()][turn:] + [*servers.items()][:turn]
    return [_Run(heat, system, server, trace, clients).row() for system, server in order]


class _Run:
    """One replay in progress."""

    def __init__(
        self, heat: Heat, system: System, server: Server, trace: Trace, clients: Executor
    ) -> None:
        server.check()
        self._heat, self._system, self._server = heat, system, server
        self._used, self._begin_s = server.used(), time.monotonic()
        self._report = clients.submit(replay, trace, server.url, _OPTIONS)

    def row(self) -> Row:
        """Wait for its end, and return its row."""
        report = self._report.result()
        self._server.check()
        wall_s = time.monotonic() - self._begin_s
        busy: Row = {}
        for name, used in self._server.used().items():
            before = self._used[name]
            busy[f"{name}_busy"] = round((used.ran_s - before.ran_s) / wall_s, 3)
            busy[f"{name}_waited"] = round((used.waited_s - before.waited_s) / wall_s, 3)
        return {
            **identity(self._heat, self._system),
            **scores(self._heat.setup, report.records),
            **_health(report),
            **busy,
            "wall_s": round(wall_s, 1),
        }


def identity(heat: Heat, system: System) -> Row:
    """Return the columns that identify a row."""
    return {
        "setup": heat.setup.name,
        "rate": heat.rate,
        "window": heat.window,
        "system": system.name,
    }


def scores(setup: Setup, records: list[RequestRecord]) -> Row:
    """Return attainment, rates and latencies in the device's time."""
    found = summarize(records, RULE)
    return {
        "num_offered": found.num_offered,
        "num_good": found.num_good,
        "num_rejected": found.num_rejected,
        "num_aborted": found.num_aborted,
        "attainment": found.attainment,
        "good_requests_per_s": found.good_requests_per_s * setup.slowdown,
        **_times(found, setup.slowdown),
    }


def _times(found: Summary, slowdown: float) -> Row:
    return {
        "ttft_p50_s": found.ttft_s.p50 / slowdown,
        "ttft_p99_s": found.ttft_s.p99 / slowdown,
        "tpot_p50_s": found.tpot_s.p50 / slowdown,
        "tpot_p99_s": found.tpot_s.p99 / slowdown,
        "tokens_per_s": found.output_tokens_per_s * slowdown,
    }


def _health(report: ReplayReport) -> Row:
    """Return what shows whether client and connection kept up."""
    return {
        "num_late_sends": report.num_late_sends,
        "max_lateness_s": round(report.max_lateness_s, 4),
        "errors": "; ".join(f"{count} x {what}" for what, count in report.errors.items()),
    }
