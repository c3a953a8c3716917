"""`slosched demo`: all steps from profile to report, by the commands that a user would type."""

from __future__ import annotations

import shlex
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from slosched.cli import options
from slosched.cli.commands.replay import replay_live
from slosched.cli.console import console
from slosched.cli.outcome_table import outcome_table
from slosched.cli.simulation import simulate_contenders
from slosched.core import (
    SLO,
    BatchShape,
    DeadlineRule,
    Limits,
    RequestStatus,
    SloschedError,
)
from slosched.evaluate.comparison import Outcome, Replica, summarize_all
from slosched.metrics import RequestRecord
from slosched.perfmodel import (
    FittedModel,
    fit,
    load_model,
    read_profile,
    save_model,
    scaled,
)
from slosched.policy import FCFS
from slosched.policy.spec import make_policy
from slosched.replay.files import read_records
from slosched.simulator.simulate import SimulationConfig, simulate
from slosched.workload import Trace, read_trace

RULE = DeadlineRule.MEAN_TPOT
OURS = ("slo_aware", "goodput")
SPECS = {
    "fcfs": "fcfs:drop=infeasible",
    "edf": "edf:drop=infeasible",
    "vllm_v1": "vllm_v1",
    "slo_aware": "slo_aware:margin=0.1",
    "goodput": "goodput:margin=0.1",
}
"""The policies that are compared, with the options that a user would choose.

All that can drop requests do so, because otherwise the comparison would only show what dropping
gains. The margin leaves room for steps that take longer than predicted on a busy machine.
"""
LABELS = {name: f"{name}, {'without' if name == 'vllm_v1' else 'with'} dropping" for name in SPECS}
BASELINE = "fcfs"
"""The policy whose capacity determines the offered rate."""
LIVE = (BASELINE, *OURS)
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
PROBE_REQUESTS = 5
OVERLOAD = 1.5
"""The offered load, as a multiple of the rate at which the baseline meets 90 % of the SLOs."""
_TARGET = 0.9
_PATIENT = SLO(ttft_s=3600.0, tpot_s=3600.0)
"""An SLO with which no policy drops a request, used instead of the server's default."""
_START_TIMEOUT_S = 180.0


class DemoError(SloschedError):
    """A step of the demo failed."""


def demo(
    out: options.OutDir = Path("runs/demo"),
    model: Annotated[
        str, typer.Option("--model", "-m", help="The model, as for `serve`: smollm2-135m.")
    ] = "smollm2-135m",
    num_requests: Annotated[
        int,
        typer.Option("--num-requests", "-n", min=1, help="Number of requests in each live replay."),
    ] = 60,
    profile_time: Annotated[
        float,
        typer.Option(
            parser=options.duration, metavar="TIME", help="How long the model is profiled: 30s."
        ),
    ] = options.Seconds(60),
    threads: Annotated[int, typer.Option(min=1, help="CPU threads that torch uses.")] = 1,
    seed: options.Seed = 0,
) -> None:
    """Profile a real model here, fit, serve it, replay a trace live under three policies, compare.

    Every step prints the command that it runs, so that you can go on from there.  The output
    folder gets a report with plots.  It takes a few minutes on two cores, most of it for profiling
    and three live replays.

    Example: `slosched demo -n 30 --profile-time 30s -o runs/demo`.
    """
    demo_files = Files(out)
    out.mkdir(parents=True, exist_ok=True)
    _heading("1. Profile: how long do real batches take here?")
    _run(
        f"profile --model {model} --threads {threads} --time-limit {profile_time:g}s --batches 60"
        f" --max-num-batched-tokens {LIMITS.max_num_batched_tokens}"
        f" --max-num-seqs {LIMITS.max_num_seqs} --max-context-tokens {MAX_CONTEXT_TOKENS}"
        f" --kv-tokens {KV_TOKENS} --seed {seed} --overwrite -o {demo_files.profile}"
    )
    _heading("2. Fit the latency model")
    _run(f"fit {demo_files.profile} -o {demo_files.model} --plot {demo_files.fit_plot}")
    _heading(f"3. Serve it under {BASELINE}, and choose what to ask of it")
    with _server(BASELINE, demo_files.model, model, threads, demo_files) as url:
        now = as_fast_as_now(load_model(demo_files.model), url, seed)
        save_model(now, demo_files.model_now)
        _make_trace(choose_load(now, num_requests, seed), num_requests, seed, demo_files)
        _heading(f"4. Replay the trace against it, open loop, then against {' and '.join(OURS)}")
        _replay(BASELINE, url, demo_files)
    for policy in OURS:
        with _server(policy, demo_files.model_now, model, threads, demo_files) as url:
            _replay(policy, url, demo_files)
    _heading("5. The same trace through the simulator, under more policies")
    _compare(demo_files, model)


def _make_trace(load: Load, num_requests: int, seed: int, files: Files) -> None:
    console.print(
        f"Promises for this machine: TTFT {load.slo.ttft_s:.2g} s, TPOT {load.slo.tpot_s:.2g} s.  "
        f"In the simulator {LABELS[BASELINE]} keeps {_TARGET:.0%} of them up to "
        f"{load.capacity:.2g} requests/s; "
        f"offered are {OVERLOAD:g} times that, in the mix of Azure's conversation trace with "
        "every length divided by 8."
    )
    _run(
        f"trace make azure_conv -n {num_requests} --rate {load.rate:.3g} --seed {seed}"
        f" --length-scale {LENGTH_SCALE} --slo-ttft {load.slo.ttft_s:.2g}"
        f" --slo-tpot {load.slo.tpot_s:.2g} -o {files.trace}"
    )


def _replay(policy: str, url: str, files: Files) -> None:
    _run(f"replay --trace {files.trace} --url {url} -o {files.live(policy)}")


@dataclass(frozen=True)
class Files:
    """The files that the demo writes to its folder."""

    folder: Path

    @property
    def profile(self) -> Path:
        return self.folder / "profile.csv"

    @property
    def model(self) -> Path:
        return self.folder / "model.json"

    @property
    def model_now(self) -> Path:
        return self.folder / "model-now.json"

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
    """The SLO and the rate of the requests that the demo sends."""

    slo: SLO
    rate: float
    capacity: float
    """Highest simulated rate in requests/s at which the baseline meets 90 % of the SLOs."""


def as_fast_as_now(model: FittedModel, url: str, seed: int) -> FittedModel:
    """Return the model, scaled to the time that a burst of requests takes on the server now.

    A machine that others use, too, may be faster or slower now than when it was profiled.
    """
    burst = _azure(PROBE_REQUESTS, seed + 1).scaled_to(1000.0).with_slo(_PATIENT)
    live = replay_live(burst, url, seed)
    if any(record.status is not RequestStatus.FINISHED for record in live):
        raise DemoError(f"the server at {url} did not answer a burst of {PROBE_REQUESTS} requests")
    expected = simulate(burst, FCFS(), model, REPLICA)
    ratio = _makespan_s(live) / _makespan_s([RequestRecord.from_request(r) for r in expected])
    console.print(f"A burst takes {ratio:.2f} times as long as the fitted model says: corrected.")
    return scaled(model, ratio)


def _makespan_s(records: Sequence[RequestRecord]) -> float:
    return max(record.token_times_s[-1] for record in records)


def choose_load(model: FittedModel, num_requests: int, seed: int) -> Load:
    """Return SLOs that the machine meets unless it is overloaded, and a rate that overloads it.

    The TPOT is the time of a step in which half of `max_num_seqs` decode next to a small chunk.
    The TTFT is three times the prefill of a prompt at the 90th percentile of lengths, plus ten
    such steps of queueing.
    """
    trace = _azure(num_requests, seed)
    context = int(trace.prompt_tokens.mean() + trace.output_tokens.mean())
    step = BatchShape()
    step.add_decodes([context] * (LIMITS.max_num_seqs // 2))
    step.add(64, 0)
    tpot_s = model.predict(step)
    long_prompt = int(sorted(trace.prompt_tokens)[int(0.9 * len(trace))])
    slo = SLO(ttft_s=3 * model.predict_prefill(long_prompt) + 10 * tpot_s, tpot_s=tpot_s)
    capacity = _capacity(trace.with_slo(slo), model)
    return Load(slo, OVERLOAD * capacity, capacity)


def _azure(num_requests: int, seed: int) -> Trace:
    arrivals = options.TraceOptions(num_requests=num_requests, rate=1.0, length_scale=LENGTH_SCALE)
    return arrivals.open("azure_conv", None, seed)


def _capacity(trace: Trace, model: FittedModel) -> float:
    """Return the highest rate at which the baseline meets 90 % of the SLOs, as `capacity` does.

    Raise DemoError if no rate is low enough.
    """
    from slosched.evaluate.capacity import (  # slow to import
        Contender,
        Plan,
        Study,
        Sweep,
        local_pool,
    )

    contender = Contender(BASELINE, SPECS[BASELINE], model, "of this machine", REPLICA)
    sweep = Sweep([contender], [trace], Plan((_TARGET,)))
    with console.status(f"searching the rate that {LABELS[BASELINE]} serves well"):
        sweep.run(local_pool(1))
    study = Study(list(sweep.measured.values()), [trace])
    found = study.capacity(BASELINE, _TARGET).requests_per_s
    if not found > 0:
        raise DemoError(f"{LABELS[BASELINE]} keeps {_TARGET:.0%} of the promises at no rate")
    return found


@contextmanager
def _server(
    policy: str, latency_model: Path, model: str, threads: int, files: Files
) -> Iterator[str]:
    """Start a server process, yield its URL once it is ready, and drain and stop it at the end."""
    port = _free_port()
    log = files.server_log(policy)
    command = (
        f"serve --model {model} --policy {SPECS[policy]} --latency-model {latency_model}"
        f" --threads {threads} --max-num-batched-tokens {LIMITS.max_num_batched_tokens}"
        f" --max-num-seqs {LIMITS.max_num_seqs} --kv-tokens {KV_TOKENS}"
        f" --host-kv-tokens {HOST_KV_TOKENS} --deadline-rule {RULE} --port {port}"
    )
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
    """Print tables of the live and simulated outcomes, and write one report of both."""
    replica = Replica(load_model(files.model_now), str(files.model_now), REPLICA)
    trace = read_trace(files.trace)
    live = {
        LABELS[policy]: Outcome(read_records(files.live(policy) / "records.jsonl").records)
        for policy in LIVE
    }
    contenders = {LABELS[name]: (make_policy(spec), replica) for name, spec in SPECS.items()}
    simulated = simulate_contenders(trace, contenders).complete()
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
        f"unfinished requests count as misses. The policies are {', '.join(SPECS.values())}."
    )
    sections = [
        comparison_section("Live", f"A real model behind a real server. {what}", live, RULE),
        comparison_section(
            "Simulated", f"The same trace on the fitted latency model. {what}", simulated, RULE
        ),
        fit_section(fit(read_profile(files.profile))),
    ]
    write_report(files.report, "slosched demo", sections, replica.provenance())


def _heading(text: str) -> None:
    console.rule(f"[bold]{text}", align="left")


def _run(command: str) -> None:
    """Run one slosched command as a user would, with its output on this terminal."""
    console.print(f"[bold green]$[/] slosched {command}", soft_wrap=True)
    process = subprocess.run([sys.executable, "-m", "slosched", *shlex.split(command)], check=False)
    if process.returncode:
        raise DemoError(f"`slosched {command}` failed with exit status {process.returncode}")
