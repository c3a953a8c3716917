"""Replays of the same traces on the engine, in wall-clock time, and on the simulator."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from profiling.gpu.models import fastest, open_fastest
from profiling.gpu.results import ResultsError, Rows, write_json
from profiling.gpu.scale import Replay, Scale
from slosched.cli.local_model import LocalModel
from slosched.core import Request, SamplingParams, ScheduledBatch, StepResult
from slosched.engine.background import InBackground
from slosched.engine.loop import Engine
from slosched.engine.overlap import LaunchingExecutor, OverlappedEngine
from slosched.evaluate.comparison import kv_capacity_tokens
from slosched.kv import KVCache
from slosched.metrics import RequestRecord, Summary, summarize
from slosched.perfmodel import FittedModel, OnlineModel
from slosched.policy.spec import make_policy
from slosched.scheduler import Scheduler
from slosched.simulator.clients import Clients
from slosched.simulator.simulate import SimulationConfig, make_requests, simulate
from slosched.workload import Trace

PREDICTED = "predictions.json"
"""The attainments that the fitted model predicts, in the folder of results."""
_COLUMNS = (
    *("trace", "rate", "policy", "overlap", "requests", "attainment"),
    *("ttft_p50_s", "ttft_p99_s", "tpot_p50_s", "tpot_p99_s", "output_tokens_per_s"),
)


def predict_all(scale: Scale, out: Path) -> None:
    """Predict every attainment with the fitted model; none is predicted twice."""
    path = out / PREDICTED
    if not path.exists():
        _, model = fastest(scale, out)
        write_json(path, predictions(scale, model))


def replay_all(scale: Scale, out: Path) -> None:
    """Replay on the engine what was predicted.

    One replay of each trace runs a second time with planning overlapped.  Raises ResultsError if
    nothing was predicted.
    """
    if not (out / PREDICTED).exists():
        raise ResultsError(
            f"{out} holds no {PREDICTED}, and predictions come first: run the stage `predict`"
        )
    local, model = open_fastest(scale, out)
    rows = Rows(out / "traffic.csv", _COLUMNS, num_keys=4)
    # The first steps compile kernels.
    first = scale.replays()[0]
    play(scale, local, model, scale.trace(first).head(8), first.policy, overlap=False)
    for found in scale.replays():
        middle = scale.rates[found.trace][len(scale.rates[found.trace]) // 2]
        both = found.rate == middle and found.policy == "goodput"
        for overlap in (False, True) if both else (False,):
            if (*found, overlap) in rows:
                continue
            trace = scale.trace(found)
            summary = _summary(scale, play(scale, local, model, trace, found.policy, overlap))
            rows.add(*found, overlap, len(trace), *_cells(summary))


def predictions(scale: Scale, model: FittedModel) -> list[dict[str, object]]:
    """Return the attainment of every replay that a simulation with `model` predicts."""
    block_size = int(model.provenance.get("block_size", 16))
    config = SimulationConfig(
        limits=scale.limits,
        num_blocks=kv_capacity_tokens(model) // block_size,
        block_size=block_size,
        num_host_blocks=0,
        online=True,
        client_timeout_s=scale.timeout_s,
    )
    found = []
    for one in scale.replays():
        requests = simulate(scale.trace(one), make_policy(one.policy), model, config)
        found.append({**one._asdict(), "attainment": _summary(scale, requests).attainment})
    return found


def play(
    scale: Scale,
    local: LocalModel,
    model: FittedModel,
    trace: Trace,
    policy: str,
    overlap: bool,
) -> list[Request]:
    """Send the trace's requests at their times to an engine in this process, until all have ended.

    The policy's latency model is corrected as the replay goes on, as that of a server is.
    """
    lengths = {r.request_id: r.num_output_tokens for r in trace.requests}
    device = _EndsAtLength(local.executor, lengths)
    kv = KVCache(local.num_blocks, local.block_size)
    scheduler = Scheduler(make_policy(policy), kv, scale.limits, OnlineModel(model))
    clock = _ClockFromZero()
    engine: Engine = (
        OverlappedEngine(scheduler, InBackground(device), clock)
        if overlap
        else Engine(scheduler, device, clock)
    )
    clients = Clients(scheduler, scale.timeout_s)
    requests = [_with_tokens(r) for r in make_requests(trace, kv.num_blocks * kv.block_size)]
    coming = deque(requests)
    clock.begin()
    while coming or engine.has_work:
        now_s = clock.now_s()
        while coming and coming[0].arrival_s <= now_s:
            clients.send(coming.popleft())
        clients.leave(now_s)
        if engine.has_work:
            engine.step()
        elif coming:
            time.sleep(max(0.0, coming[0].arrival_s - clock.now_s()))
    return requests


class _ClockFromZero:
    """A clock of real seconds since `begin`."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        self._start_s = time.monotonic()

    def now_s(self) -> float:
        return time.monotonic() - self._start_s


class _EndsAtLength:
    """An executor that ends each answer at the length that its trace has."""

    def __init__(self, executor: LaunchingExecutor, output_lengths: Mapping[str, int]) -> None:
        self._executor = executor
        self._lengths = output_lengths
        self.release: Callable[[str], None] = executor.release

    def execute(self, batch: ScheduledBatch) -> StepResult:
        return self.launch(batch)()

    def launch(self, batch: ScheduledBatch) -> Callable[[], StepResult]:
        return partial(self._ended, batch, self._executor.launch(batch))

    def _ended(self, batch: ScheduledBatch, wait: Callable[[], StepResult]) -> StepResult:
        """Wait for a step, and stop the answers that have their length."""
        result = wait()
        stopped = [
            chunk.request.request_id
            for chunk in batch.chunks
            if chunk.emits_token and _num_emitted(*chunk[:3]) >= self._length(chunk.request)
        ]
        return replace(result, stopped=result.stopped | frozenset(stopped))

    def _length(self, request: Request) -> int:
        return self._lengths[request.request_id]


def _num_emitted(request: Request, num_new: int, num_prior: int) -> int:
    """Return the number of a request's output tokens after a step that emits one."""
    return num_prior + num_new - request.num_prompt_tokens + 1


def _with_tokens(request: Request) -> Request:
    """Return the request with some token ids as its prompt, which random weights do not mind."""
    ids = [1 + i % 200 for i in range(request.num_prompt_tokens)]
    return replace(request, prompt_token_ids=ids, sampling=SamplingParams(ignore_eos=True))


def _summary(scale: Scale, requests: list[Request]) -> Summary:
    records = [RequestRecord.from_request(request) for request in requests]
    return summarize(records, scale.limits.deadline_rule)


def _cells(summary: Summary) -> tuple[float, ...]:
    return (
        summary.attainment,
        *(summary.ttft_s.p50, summary.ttft_s.p99, summary.tpot_s.p50, summary.tpot_s.p99),
        summary.output_tokens_per_s,
    )


def replay_of(row: Mapping[Hashable, object]) -> Replay:
    """Return the replay that a row of predictions or of results is of."""
    return Replay(str(row["trace"]), float(str(row["rate"])), str(row["policy"]))
