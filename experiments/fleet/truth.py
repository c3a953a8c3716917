"""Does the simulated fleet tell what real servers do?  Four of them, behind `slosched route`.

Two servers emulate an L40S and two an L4, each `slosched serve` in a process of its own.  The same
requests are sent to them over HTTP and replayed in the simulator.  Everything is in slow motion:
steps, promises and the gaps between arrivals take `SLOWDOWN` times as long, so that what servers
and clients do besides counts for less.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pandas as pd

from experiments.markdown import table
from slosched.cli.console import progress_bar
from slosched.core import SLO, DeadlineRule, Limits, SloschedError
from slosched.evaluate.comparison import kv_capacity_tokens
from slosched.fleet.setup import FleetSetup
from slosched.fleet.simulate import FleetConfig
from slosched.fleet.view import ReplicaKind
from slosched.metrics import RequestRecord, records_of, summarize
from slosched.perfmodel import NO_SERVER_TIME, FittedModel, load_model, save_model, scaled
from slosched.perfmodel.forms import described
from slosched.policy.spec import make_policy
from slosched.replay.client import ReplayOptions, replay
from slosched.simulator.simulate import SimulationConfig
from slosched.workload import Trace, synthesize

RESULTS = Path(__file__).with_name("truth.csv")
PAGE = Path(__file__).with_name("truth.md")
DEVICES = ("l40s/llama-3.1-8b", "l40s/llama-3.1-8b", "l4/llama-3.1-8b", "l4/llama-3.1-8b")
ROUTERS = ("round_robin", "least_requests", "predicted_ttft")
RATES = (8.0, 10.0, 12.0)
"""Requests/s of the fleet, without slow motion."""
SLOWDOWN = 2.5
_NUM_REQUESTS = 200
_TTFT_S, _TPOT_S = 1.5, 0.3
_LIMITS = Limits(max_num_batched_tokens=512, max_num_seqs=32)
_POLICY = "fcfs+door:refuse=unkeepable"
_RULE = DeadlineRule.MEAN_TPOT
_MODEL_FILE = "llama-3.1-8b.json"
"""The file in each device's folder: servers have the same model if they are started by one name."""
_ADDRESS = re.compile(r" at\s+(http://\S+) ")


def play() -> None:
    """Play what truth.csv does not have, and write it there."""
    kept = pd.read_csv(RESULTS) if RESULTS.exists() else pd.DataFrame(columns=["router", "rate"])
    known = set(kept[["router", "rate"]].itertuples(index=False, name=None))
    cases = [(router, rate) for router in ROUTERS for rate in RATES if (router, rate) not in known]
    rows: list[Mapping[Hashable, object]] = [*kept.to_dict("records")]
    with TemporaryDirectory() as folder, progress_bar() as progress:
        models = _models(Path(folder))
        with _servers([models[name][0] for name in DEVICES]) as urls:
            for router, rate in progress.track(cases, description="replaying"):
                rows.append(_row(router, rate, urls, {n: m for n, (_, m) in models.items()}))
                pd.DataFrame(rows).to_csv(RESULTS, index=False)


def page() -> str:
    """Return the table of truth.csv."""
    found = pd.read_csv(RESULTS).sort_values(["rate", "router"])
    rows = [_cells(row) for row in found.to_dict("records")]
    heads = ["requests/s", "router", "live", "simulated", "difference", "latest send"]
    return (
        "# The simulated fleet and real servers\n\n"
        "Made by `python -m experiments.fleet truth`.  Shares of requests within their SLO, the "
        f"same {_NUM_REQUESTS} requests on both sides.  Rates are those without slow motion; "
        f"everything took {SLOWDOWN:g} times as long.  The latest send is how late the client sent "
        "a request at most.\n\n" + table(heads, rows, 2) + "\n"
    )


def _cells(row: Mapping[Hashable, Any]) -> tuple[str, ...]:
    return (
        f"{row['rate']:g}",
        f"`{row['router']}`",
        f"{100 * row['live']:.1f} %",
        f"{100 * row['simulated']:.1f} %",
        f"{100 * (row['simulated'] - row['live']):+.1f}",
        f"{1000 * row['max_lateness_s']:.0f} ms",
    )


def traffic(rate: float) -> Trace:
    """Return the requests at a rate of the fleet, in slow motion."""
    trace = synthesize("azure_code", num_requests=_NUM_REQUESTS, seed=1)
    slo = SLO(ttft_s=_TTFT_S * SLOWDOWN, tpot_s=_TPOT_S * SLOWDOWN)
    return trace.with_poisson_arrivals(rate / SLOWDOWN, seed=1).with_slo(slo)


def _models(folder: Path) -> dict[str, tuple[Path, FittedModel]]:
    """Return each device's latency model in slow motion, and a folder with it."""
    models = {}
    for name in dict.fromkeys(DEVICES):
        bundled = load_model(name)
        bare = described(
            bundled, bundled.provenance, bundled.held_out_error, server_time=NO_SERVER_TIME
        )
        model = scaled(bare, SLOWDOWN)
        of_device = folder / name.partition("/")[0]
        of_device.mkdir()
        save_model(model, of_device / _MODEL_FILE)
        models[name] = of_device, model
    return models


def _row(
    router: str, rate: float, urls: Sequence[str], models: Mapping[str, FittedModel]
) -> Mapping[Hashable, object]:
    """Play one case on the servers and in the simulator."""
    trace = traffic(rate)
    kinds = {name: _kind(model) for name, model in models.items()}
    fleet = FleetSetup(tuple(kinds[name] for name in DEVICES), DEVICES, router, FleetConfig())
    simulated = records_of(fleet.simulate(trace, make_policy(_POLICY), seed=0), _RULE)
    replicas = [word for url in urls for word in ("--url", url)]
    with _started("route", "--port", "0", "--router", router, *replicas) as front:
        # As many warm-up requests as replicas, so that round robin begins anew with the first.
        report = replay(trace, front, ReplayOptions(seed=1, num_warmup=len(DEVICES)))
    return {
        "router": router,
        "rate": rate,
        "live": _share(report.records),
        "simulated": _share(simulated),
        "max_lateness_s": round(report.max_lateness_s, 4),
        "errors": sum(report.errors.values()),
    }


def _share(records: Sequence[RequestRecord]) -> float:
    return round(summarize(records, _RULE).attainment, 5)


def _kind(model: FittedModel) -> ReplicaKind:
    num_blocks = kv_capacity_tokens(model) // 16
    return ReplicaKind(model, SimulationConfig(limits=_LIMITS, num_blocks=num_blocks))


@contextmanager
def _servers(folders: Sequence[Path]) -> Iterator[list[str]]:
    """Start a server for the latency model in each folder, and yield their addresses."""
    options = (
        *("--policy", _POLICY),
        *("--max-num-batched-tokens", str(_LIMITS.max_num_batched_tokens)),
        *("--max-num-seqs", str(_LIMITS.max_num_seqs)),
    )
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                _started("serve", "--port", "0", "--emulate", _MODEL_FILE, *options, folder=folder)
            )
            for folder in folders
        ]


@contextmanager
def _started(*words: str, folder: Path | None = None) -> Iterator[str]:
    """Start a command of slosched, yield the address that it prints, and stop it at the end."""
    with TemporaryDirectory() as scratch:
        output = Path(scratch) / "output.txt"
        command = [sys.executable, "-m", "slosched", *words]
        with output.open("ab") as written:
            process = subprocess.Popen(
                command, stdout=written, stderr=subprocess.STDOUT, cwd=folder
            )
        try:
            while (found := _ADDRESS.search(output.read_text(encoding="utf-8"))) is None:
                try:
                    process.wait(0.1)
                except subprocess.TimeoutExpired:
                    continue
                said = output.read_text(encoding="utf-8")
                raise SloschedError(f"`slosched {words[0]}` ended before it was ready: {said}")
            yield found[1]
        finally:
            process.terminate()
            process.wait()
