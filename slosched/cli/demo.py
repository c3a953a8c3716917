"""`slosched demo`: the whole path on this machine, by the commands that a user would type."""

from __future__ import annotations

import shlex
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from slosched.cli import options
from slosched.cli.console import console
from slosched.cli.results import Outcome, outcome_table, summarize_all
from slosched.cli.simulation import Replica, simulate_policies
from slosched.core import SLO, BatchShape, DeadlineRule, LatencyModel, Limits, SloschedError
from slosched.engine.simulate import SimulationConfig, simulate
from slosched.evaluate.metrics import RequestRecord, summarize
from slosched.evaluate.records import read_records
from slosched.perfmodel import fit_linear, load_model, read_profile
from slosched.policy import FCFS, POLICIES
from slosched.policy.spec import make_policy
from slosched.workload import Trace, read_trace

RULE = DeadlineRule.MEAN_TPOT
SPECS = {name: name for name in POLICIES} | {"slo_aware": "slo_aware:margin=0.1"}
"""The margin leaves room for steps that take longer than predicted, as they do on a busy desk."""
LIVE = ("fcfs", "slo_aware")
LIMITS = Limits(max_num_batched_tokens=256, max_num_seqs=16, deadline_rule=RULE)
KV_TOKENS, HOST_KV_TOKENS, BLOCK_SIZE = 16_384, 4_096, 16
MAX_CONTEXT_TOKENS = 1024
REPLICA = SimulationConfig(
    limits=LIMITS,
    num_blocks=KV_TOKENS // BLOCK_SIZE,
    block_size=BLOCK_SIZE,
    num_host_blocks=HOST_KV_TOKENS // BLOCK_SIZE,
)
LENGTH_SCALE = 0.125
OVERLOAD = 1.5
"""Offered load over the highest rate at which `fcfs` keeps 90 % of the promises."""
_START_TIMEOUT_S = 180.0


class DemoError(SloschedError):
    """A step of the demo failed."""


def demo(
    out: options.OutDir = Path("runs/demo"),
    model: Annotated[str, typer.Option("--model", "-m", help="As in `serve`.")] = "smollm2-135m",
    num_requests: Annotated[
        int, typer.Option("--num-requests", "-n", min=1, help="To replay.")
    ] = 60,
    profile_time: Annotated[
        float, typer.Option(parser=options.duration, metavar="TIME", help="For profiling.")
    ] = 60.0,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads of torch.")] = 1,
    seed: options.Seed = 0,
) -> None:
    """Profile a real model here, fit, serve it, replay a trace live under two policies, compare.

    Every step prints the command that does it, so that you can go on from there.  Leaves a report
    with plots in the output folder.  Takes a few minutes on two cores, most of it profiling and
    two live replays.
    """
    demo_files = Files(out)
    out.mkdir(parents=True, exist_ok=True)
    _heading("1. Profile: how long do real batches take here?")
    _run(
        f"profile --model {model} --threads {threads} --time-limit {profile_time}s --repeats 2"
        f" --max-num-batched-tokens {LIMITS.max_num_batched_tokens}"
        f" --max-num-seqs {LIMITS.max_num_seqs} --max-context-tokens {MAX_CONTEXT_TOKENS}"
        f" --kv-tokens {KV_TOKENS} --seed {seed} -o {demo_files.profile}"
    )
    _heading("2. Fit the latency model")
    _run(f"fit {demo_files.profile} -o {demo_files.model} --plot {demo_files.fit_plot}")
    _heading("3. A trace: the Azure conversation mix, every length divided by 8")
    load = choose_load(load_model(demo_files.model), num_requests, seed)
    console.print(
        f"Promises for this machine: TTFT {load.slo.ttft_s:.2g} s, TPOT {load.slo.tpot_s:.2g} s.  "
        f"In the simulator fcfs keeps 90 % of them up to {load.capacity:.2g} requests/s; "
        f"offered are {OVERLOAD:g} times that."
    )
    _run(
        f"trace make azure_conv -n {num_requests} --rate {load.rate:.3g} --seed {seed}"
        f" --length-scale {LENGTH_SCALE} --slo-ttft {load.slo.ttft_s:.2g}"
        f" --slo-tpot {load.slo.tpot_s:.2g} -o {demo_files.trace}"
    )
    _heading("4. Serve the model and replay the trace, open loop, once under each policy")
    for policy in LIVE:
        _serve_and_replay(policy, model, threads, demo_files)
    _heading("5. The same trace through the simulator, under every policy")
    _compare(demo_files, model)


@dataclass(frozen=True)
class Files:
    """What the demo leaves in its folder."""

    folder: Path

    @property
    def profile(self) -> Path:
        return self.folder / "profile.csv"

    @property
    def model(self) -> Path:
        return self.folder / "model.json"

    @property
    def fit_plot(self) -> Path:
        return self.folder / "fit.png"

    @property
    def trace(self) -> Path:
        return self.folder / "trace.csv"

    @property
    def report(self) -> Path:
        return self.folder / "report.html"

    def live(self, policy: str) -> Path:
        return self.folder / f"live-{policy}"

    def server_log(self, policy: str) -> Path:
        return self.live(policy).with_suffix(".log")


@dataclass(frozen=True)
class Load:
    """What is asked of the machine."""

    slo: SLO
    rate: float
    capacity: float
    """Highest simulated rate at which `fcfs` keeps 90 % of the promises."""


def choose_load(model: LatencyModel, num_requests: int, seed: int) -> Load:
    """Promises that the machine can keep when it is not too busy, and a load at which it is.

    TPOT: a step with half the seats decoding and a small chunk.  TTFT: three times the prefill of
    a prompt as long as one in ten, and ten such steps of queueing.
    """
    trace = _azure(num_requests, seed)
    context = int(trace.prompt_tokens.mean() + trace.output_tokens.mean())
    step = BatchShape()
    step.add_decodes([context] * (LIMITS.max_num_seqs // 2))
    step.add(64, 0)
    tpot_s = model.predict(step)
    long_prompt = int(sorted(trace.prompt_tokens)[int(0.9 * len(trace))])
    slo = SLO(ttft_s=3 * model.predict_prefill(long_prompt) + 10 * tpot_s, tpot_s=tpot_s)
    capacity = _fcfs_capacity(trace.with_slo(slo), model)
    return Load(slo, OVERLOAD * capacity, capacity)


def _azure(num_requests: int, seed: int) -> Trace:
    arrivals = options.TraceOptions(num_requests=num_requests, rate=1.0, length_scale=LENGTH_SCALE)
    return arrivals.open("azure_conv", None, seed)


def _fcfs_capacity(trace: Trace, model: LatencyModel) -> float:
    """By bisection over the rate, to 2 %."""
    low, high = 0.01, 1000.0
    while high / low > 1.02:
        rate = (low * high) ** 0.5
        requests = simulate(trace.scaled_to(rate), FCFS(), model, REPLICA)
        records = [RequestRecord.from_request(r) for r in requests]
        if summarize(records, RULE).attainment >= 0.9:
            low = rate
        else:
            high = rate
    return low


def _serve_and_replay(policy: str, model: str, threads: int, files: Files) -> None:
    port = _free_port()
    command = (
        f"serve --model {model} --policy {SPECS[policy]} --latency-model {files.model}"
        f" --threads {threads} --max-num-batched-tokens {LIMITS.max_num_batched_tokens}"
        f" --max-num-seqs {LIMITS.max_num_seqs} --kv-tokens {KV_TOKENS}"
        f" --host-kv-tokens {HOST_KV_TOKENS} --deadline-rule {RULE} --port {port}"
    )
    with _server(command, port, files.server_log(policy)) as url:
        _run(f"replay --trace {files.trace} --url {url} -o {files.live(policy)}")


@contextmanager
def _server(command: str, port: int, log: Path) -> Iterator[str]:
    """A server in a process of its own, ready to answer; stopped and drained at the end."""
    console.print(f"[bold green]$[/] slosched {command} &")
    url = f"http://127.0.0.1:{port}"
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "slosched", *shlex.split(command)],
            stdout=file,
            stderr=subprocess.STDOUT,
        )
        try:
            with console.status("waiting for the server"):
                _wait_until_ready(process, url, log)
            yield url
        finally:
            process.terminate()
            try:
                process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()


def _wait_until_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline_s = time.monotonic() + _START_TIMEOUT_S
    while process.poll() is None and time.monotonic() < deadline_s:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.2)
    raise DemoError(f"the server did not start; it said:\n{log.read_text()[-2000:]}")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def _compare(files: Files, model: str) -> None:
    """Live and simulated outcomes, as tables and as one report."""
    replica = Replica(load_model(files.model), str(files.model), REPLICA)
    trace = read_trace(files.trace)
    live = {
        policy: Outcome(read_records(files.live(policy) / "records.jsonl").records)
        for policy in LIVE
    }
    simulated = simulate_policies(
        trace, {name: make_policy(spec) for name, spec in SPECS.items()}, replica
    )
    console.print(outcome_table(f"Live: {model} on this machine", summarize_all(live, RULE)))
    console.print(outcome_table("Simulated with the fitted model", summarize_all(simulated, RULE)))
    _report(files, trace, live, simulated, replica)
    console.print(f"wrote {files.report}")


def _report(
    files: Files,
    trace: Trace,
    live: Mapping[str, Outcome],
    simulated: Mapping[str, Outcome],
    replica: Replica,
) -> None:
    from slosched.cli.figures import comparison_section, fit_section  # slow to import
    from slosched.evaluate.report import write_report

    what = (
        f"{len(trace)} requests of the Azure conversation mix with lengths divided by 8, at "
        f"{trace.rate:.3g} requests/s, judged by the deadline rule {RULE}. Rejected and "
        f"unfinished requests count as misses. slo_aware is {SPECS['slo_aware']}."
    )
    sections = [
        comparison_section("Live", f"A real model behind a real server. {what}", live, RULE),
        comparison_section(
            "Simulated", f"The same trace on the fitted latency model. {what}", simulated, RULE
        ),
        fit_section(fit_linear(read_profile(files.profile))),
    ]
    write_report(files.report, "slosched demo", sections, replica.provenance())


def _heading(text: str) -> None:
    console.rule(f"[bold]{text}", align="left")


def _run(command: str) -> None:
    """Run one slosched command as a user would, its output on this terminal."""
    console.print(f"[bold green]$[/] slosched {command}", soft_wrap=True)
    process = subprocess.run([sys.executable, "-m", "slosched", *shlex.split(command)], check=False)
    if process.returncode:
        raise DemoError(f"`slosched {command}` failed with exit status {process.returncode}")
