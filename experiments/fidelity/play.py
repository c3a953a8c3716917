"""Simulates a measured run, and says what a client would have seen in each of its stages."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

import numpy as np

from experiments.fidelity.load import BLOCK_SIZE, stage_of, trace_of
from experiments.fidelity.stages import Run
from slosched.core import Limits, Request
from slosched.kv import PrefixCaching
from slosched.perfmodel import FittedModel
from slosched.policy.spec import make_policy
from slosched.simulator.simulate import SimulationConfig, simulate

POLICY = "vllm_v1"
CLIENT_TIMEOUT_S = 300.0
"""The time after which aiohttp, which inference-perf uses, gives up a request by default."""


def play(run: Run, model: FittedModel) -> Iterator[dict[str, float]]:
    """Yield the simulated latencies of each stage, by the names of the measured ones.

    The server plans ahead and caches prefixes, as vLLM 0.15.1 does by default.  Its KV cache has
    the size that vLLM reported or, where that was not published, the one that `model` states.
    """
    server = run[0]
    stated_blocks = int(model.provenance["kv_capacity_tokens"]) // BLOCK_SIZE
    config = SimulationConfig(
        Limits(server.max_num_batched_tokens, server.max_num_seqs),
        num_blocks=stated_blocks if np.isnan(server.kv_blocks) else int(server.kv_blocks),
        block_size=BLOCK_SIZE,
        prefix_cache=PrefixCaching.HASH,
        # It delays a first token by a step, which does not show where requests wait for minutes.
        # Without it such a long simulation is several times as fast.
        overlap=not any(stage.is_saturated for stage in run),
        client_timeout_s=CLIENT_TIMEOUT_S,
    )
    requests = simulate(trace_of(run), make_policy(POLICY), model, config)
    for _, of_stage in groupby(requests, key=lambda request: stage_of(request.request_id)):
        yield seen(list(of_stage))


def seen(requests: list[Request]) -> dict[str, float]:
    """Return means and quantiles of the requests' latencies at the client."""
    served = [r for r in requests if r.num_output_tokens == r.max_tokens]
    first_s = np.array([r.token_times_s[0] - r.arrival_s for r in served])
    whole_s = np.array([r.token_times_s[-1] - r.arrival_s for r in served])
    return {
        "e2e_mean_s": float(whole_s.mean()),
        "ttft_mean_s": float(first_s.mean()),
        "ttft_p50_s": float(np.median(first_s)),
        "ttft_p99_s": float(np.quantile(first_s, 0.99)),
        "num_succeeded": len(served),
    }
