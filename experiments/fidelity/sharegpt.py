"""Two runs of vLLM 0.19 under ShareGPT's requests, request by request.

LLMServingSim's authors measured them (CASYS Lab, KAIST; MIT licence), and the kernels of the same
GPUs, from which the bundled latency models were made.  Nothing is fitted to the runs.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from slosched.core import Limits
from slosched.kv import PrefixCaching
from slosched.perfmodel import FittedModel, load_model
from slosched.policy.spec import make_policy
from slosched.simulator.simulate import SimulationConfig, simulate
from slosched.workload import Trace, TraceRequest
from slosched.workload.statistics import FloatArray, IntArray

NAME = "sharegpt"
MEASURED = Path(__file__).parent / "measured"
_FITTED = Path(__file__).parent / "models"
BUNDLED, UNEQUAL = "bundled", "unequal contexts"
"""The latency models with which a run is simulated."""
COMMIT = "5daddb21"
_BLOCK_SIZE = 16
_REQUEST = ("prompt", "queued_s", "prompt_tokens", "output_tokens")
_PROMPTS = "workloads/sharegpt-llama-3.1-8b-300-sps10.jsonl"


@dataclass(frozen=True)
class ShareGPTRun:
    """A measured run, the latency model of its GPU, and vLLM's settings in it."""

    model: str
    served: str
    """Its folder in `bench/examples`."""
    max_num_seqs: int
    kv_tokens: int

    @property
    def with_unequal_contexts(self) -> FittedModel:
        """Return the latency model that was also fitted to decodes of unequal contexts."""
        return load_model(str(_FITTED / f"{self.model}.json"))

    @property
    def path(self) -> Path:
        return MEASURED / f"sharegpt_{self.model.partition('/')[0]}.csv"


RUNS = (
    ShareGPTRun("rtx4090/llama-3.1-8b", "RTX4090/Llama-3.1-8B", 256, 41_408),
    # The size of the KV cache is the one that LLMServingSim's simulation of the run states.
    ShareGPTRun("rtxpro6000/llama-3.1-8b", "RTXPRO6000/Llama-3.1-8B", 128, 585_248),
)


def collect(git: Path) -> None:
    """Write the requests of the runs: their lengths, common prefixes, and measured times."""
    prompts = [json.loads(line)["input_tok_ids"] for line in _show(git, _PROMPTS)]
    like = list(_likenesses(prompts))
    for run in RUNS:
        rows = map(json.loads, _show(git, f"bench/examples/{run.served}/vllm/requests.jsonl"))
        measured = sorted(rows, key=lambda row: float(row["queued_ts"]))
        start_s = measured[0]["queued_ts"]
        frame = pd.DataFrame(
            {
                "prompt": number,
                "prompt_tokens": row["input_toks"],
                "output_tokens": row["output_toks"],
                "like_prompt": like[number][0],
                "like_blocks": like[number][1],
                "queued_s": row["queued_ts"] - start_s,
                "first_token_s": row["first_token_ts"] - start_s,
                "last_token_s": row["last_token_ts"] - start_s,
            }
            for row in measured
            for number in [int(row["request_id"].removeprefix("bench-"))]
        )
        frame.to_csv(run.path, index=False, float_format="%.6f")


def simulate_both(run: ShareGPTRun) -> Iterator[dict[str, Any]]:
    """Yield what `simulate_run` returns for the bundled latency model and for the other one."""
    for name, model in ((BUNDLED, None), (UNEQUAL, run.with_unequal_contexts)):
        yield {"latency_model": name, **simulate_run(run, model)}


def simulate_run(run: ShareGPTRun, model: FittedModel | None = None) -> dict[str, Any]:
    """Simulate a run, and return measured means and medians beside the simulated ones.

    The latency model is the run's, unless another one is given.
    """
    model = model or load_model(run.model)
    frame = pd.read_csv(run.path)
    config = SimulationConfig(
        Limits(max_num_batched_tokens=2048, max_num_seqs=run.max_num_seqs),
        num_blocks=run.kv_tokens // _BLOCK_SIZE,
        block_size=_BLOCK_SIZE,
        prefix_cache=PrefixCaching.HASH,
        overlap=True,
    )
    requests = simulate(trace_of(frame), make_policy("vllm_v1"), model, config)
    first_s = np.array([r.token_times_s[0] - r.arrival_s for r in requests])
    whole_s = np.array([r.token_times_s[-1] - r.arrival_s for r in requests])
    real = frame[["first_token_s", "last_token_s"]].sub(frame["queued_s"], axis=0).to_numpy()
    gaps = frame["output_tokens"].to_numpy() - 1
    measured = _latencies(real[:, 0], real[:, 1], gaps)
    simulated = _latencies(first_s, whole_s, gaps)
    return {
        "run": run.served,
        "num_requests": len(frame),
        "num_preemptions_sim": sum(r.num_preemptions for r in requests),
        **measured,
        **{f"{name}_sim": value for name, value in simulated.items()},
    }


def _latencies(first_s: FloatArray, whole_s: FloatArray, gaps: IntArray) -> dict[str, float]:
    """Return means and a median of TTFT, TPOT and E2E latency."""
    many = gaps > 0
    return {
        "ttft_mean_s": float(first_s.mean()),
        "ttft_p50_s": float(np.median(first_s)),
        "tpot_mean_s": float(((whole_s - first_s)[many] / gaps[many]).mean()),
        "e2e_mean_s": float(whole_s.mean()),
    }


def trace_of(frame: pd.DataFrame) -> Trace:
    """Return the requests of a run, with hashes by which equal prompt blocks are found."""
    lengths = dict(zip(frame["prompt"], frame["prompt_tokens"], strict=True))
    like = dict(
        zip(
            frame["prompt"],
            zip(frame["like_prompt"], frame["like_blocks"], strict=True),
            strict=True,
        )
    )
    hashes: dict[int, tuple[int, ...]] = {-1: ()}
    for prompt in sorted(lengths):
        other, num_blocks = like[prompt]
        own = range(num_blocks, lengths[prompt] // _BLOCK_SIZE)
        hashes[prompt] = (*hashes[other][:num_blocks], *(hash((prompt, i)) for i in own))
    requests = [
        TraceRequest(
            str(prompt), queued_s, prompt_tokens, output_tokens, prefix_hashes=hashes[prompt]
        )
        for prompt, queued_s, prompt_tokens, output_tokens in zip(
            *(frame[name].tolist() for name in _REQUEST), strict=True
        )
    ]
    return Trace.of(requests, NAME, prefix_block_tokens=_BLOCK_SIZE)


def _likenesses(prompts: Sequence[Sequence[int]]) -> Iterator[tuple[int, int]]:
    """Yield for each prompt the earlier one that it has most first blocks in common with.

    It is -1 and 0 if there is none.
    """
    seen: dict[tuple[int, ...], int] = {}
    for number, tokens in enumerate(prompts):
        other, common = -1, 0
        for num_blocks in range(1, len(tokens) // _BLOCK_SIZE + 1):
            prefix = tuple(tokens[: num_blocks * _BLOCK_SIZE])
            if prefix in seen:
                other, common = seen[prefix], num_blocks
            else:
                seen[prefix] = number
        yield other, common


def _show(git: Path, path: str) -> list[str]:
    command = ["git", f"--git-dir={git}", "show", f"{COMMIT}:{path}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
