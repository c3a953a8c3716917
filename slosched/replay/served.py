"""What slosched's own server adds to its device, measured on a server in this process.

A client in a process of its own sends requests, as any client would.  It tells when it saw the
first tokens, and the engine tells when it had them and how long the device waited between steps.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise
from multiprocessing import get_context

from slosched.core import Executor, Limits
from slosched.engine.host_time import waited_s
from slosched.engine.loop import Engine, MonotonicClock, StepRecord
from slosched.engine.server import (
    EngineWorker,
    ServerConfig,
    Tokenizer,
    build_app,
    serve_in_thread,
)
from slosched.kv import KVCache
from slosched.metrics import RequestRecord
from slosched.perfmodel import ServerTime
from slosched.policy import FCFS
from slosched.replay.client import ReplayOptions, replay
from slosched.scheduler import Scheduler
from slosched.workload import Trace, TraceRequest

_NUM_SINGLE, _EVERY_S = 20, 0.1
"""Requests with one output token, one after the other: they show what a request costs."""
_NUM_LONG, _OUTPUT_TOKENS = 8, 32
"""Requests that decode together: they show how long the device waits between steps."""
_PROMPT_TOKENS = 16


def measured_server_time(
    executor: Executor, tokenizer: Tokenizer, num_blocks: int, block_size: int
) -> ServerTime:
    """Return what a server in front of `executor` adds; takes a few seconds.

    The time per step on the device stays 0, since an executor's own time has all of it.
    """
    scheduler = Scheduler(FCFS(), KVCache(num_blocks, block_size), Limits())
    worker = EngineWorker(Engine(scheduler, executor, MonotonicClock()))
    config = ServerConfig("measured", max_model_len=num_blocks * block_size)
    app = build_app(worker, tokenizer, config)
    with (
        ProcessPoolExecutor(1, get_context("spawn")) as client,
        serve_in_thread(app, worker) as url,
        worker.steps.listen() as listener,
    ):
        seen = client.submit(replay, _trace(), url, ReplayOptions(num_warmup=1)).result()
        steps = listener.take(len(_trace()) * _OUTPUT_TOKENS)
        ended = list(worker.records)
    return ServerTime(
        per_request_s=_per_request_s(seen.records, ended), per_step_host_s=_per_step_s(steps)
    )


def _trace() -> Trace:
    singles = [
        TraceRequest(f"single-{i}", i * _EVERY_S, _PROMPT_TOKENS, 1) for i in range(_NUM_SINGLE)
    ]
    together_s = (_NUM_SINGLE + 1) * _EVERY_S
    long = [
        TraceRequest(f"long-{i}", together_s, _PROMPT_TOKENS, _OUTPUT_TOKENS)
        for i in range(_NUM_LONG)
    ]
    return Trace.of([*singles, *long], "requests to measure a server")


def _per_request_s(seen: Sequence[RequestRecord], ended: Sequence[RequestRecord]) -> float:
    """Return how much later than the engine the client has the token of a single request."""
    clients_s, engines_s = _single_ttfts_s(seen), _single_ttfts_s(ended)
    after_warm_up_s = engines_s[len(engines_s) - len(clients_s) :]
    late_s = [client - engine for client, engine in zip(clients_s, after_warm_up_s, strict=True)]
    return max(0.0, statistics.median(late_s))


def _single_ttfts_s(records: Sequence[RequestRecord]) -> list[float]:
    """Return the TTFTs of the requests with one output token, in the order of their arrivals."""
    single = [(r.arrival_s, r.ttft_s) for r in records if r.num_output_tokens == 1]
    return [ttft_s for _, ttft_s in sorted(single) if ttft_s is not None]


def _per_step_s(steps: Sequence[StepRecord]) -> float:
    """Return the median time that the device waited between two steps."""
    waits_s = [waited_s(before, after) for before, after in pairwise(steps)]
    return statistics.median(s for s in waits_s if s is not None)
