"""Runs: the same requests to several servers, at once where the device sleeps, else in turns."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass

from experiments.inside_vllm.server import Server
from experiments.inside_vllm.setups import RULE, Setup, System
from slosched.engine.client import ReplayOptions, ReplayReport, replay_async
from slosched.evaluate.metrics import RequestRecord, Summary, summarize
from slosched.workload import Trace

Row = dict[str, object]

_OPTIONS = ReplayOptions(num_warmup=1, drain_timeout_s=180.0)


@dataclass(frozen=True)
class Heat:
    """One part of the trace at one rate, for all systems."""

    setup: Setup
    rate: float
    window: int


def run(heat: Heat, servers: Mapping[System, Server]) -> list[Row]:
    """A row a system.  Whoever is first in one heat is last in the next."""
    trace = heat.setup.load(heat.rate, heat.window)
    order = list(servers)
    order = order[heat.window % len(order) :] + order[: heat.window % len(order)]
    return asyncio.run(_run(heat, trace, {system: servers[system] for system in order}))


async def _run(heat: Heat, trace: Trace, servers: Mapping[System, Server]) -> list[Row]:
    runs = [_measured(heat, system, server, trace) for system, server in servers.items()]
    if heat.setup.is_emulated:
        return list(await asyncio.gather(*runs))
    return [await each for each in runs]


async def _measured(heat: Heat, system: System, server: Server, trace: Trace) -> Row:
    server.check()
    cpu_s, begin_s = server.cpu_s(), time.monotonic()
    report = await replay_async(trace, server.url, _OPTIONS)
    server.check()
    wall_s = time.monotonic() - begin_s
    busy = {name: round((s - cpu_s[name]) / wall_s, 3) for name, s in server.cpu_s().items()}
    return {
        **identity(heat, system),
        **scores(heat.setup, report.records),
        **_health(report),
        "api_busy": busy["api_s"],
        "engine_busy": busy["engine_s"],
        "wall_s": round(wall_s, 1),
    }


def identity(heat: Heat, system: System) -> Row:
    """What tells a row from others."""
    return {
        "setup": heat.setup.name,
        "rate": heat.rate,
        "window": heat.window,
        "system": system.name,
    }


def scores(setup: Setup, records: list[RequestRecord]) -> Row:
    """What the requests got, in the device's time."""
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
    """Whether client and connection were up to it."""
    return {
        "num_late_sends": report.num_late_sends,
        "max_lateness_s": round(report.max_lateness_s, 4),
        "errors": "; ".join(f"{count} x {what}" for what, count in report.errors.items()),
    }
