"""The load of a run, as the client inference-perf 0.3 makes it.

Its prompts are random tokens: ten groups of ten, and the prompts of a group begin with the same
system prompt.  (The recorded settings ask for other numbers by names that this version does not
know; `results/config.yaml` of the runs shows the numbers that it used.)  The hundred prompts are
shuffled once and then sent in turn, from the first one in every stage.  Its "constant" arrivals are
exponential gaps, scaled so that they fill the stage.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from experiments.fidelity.stages import Run, Stage
from slosched.workload import Trace, TraceRequest

NUM_GROUPS = 10
NUM_PROMPTS_PER_GROUP = 10
BLOCK_SIZE = 16
_PLAYED_S, _PLAYED_REQUESTS = 240.0, 1000
"""The least that is played of a stage that does not saturate its server; the rest is like it."""
_PAUSE_S = 600.0
"""Time between two stages: the client waits until all requests have ended."""


def trace_of(run: Run, seed: int = 0) -> Trace:
    """Return the requests of all stages, one stage long after the other.

    The id of a request begins with the number of its stage: "1/17".
    """
    rng = np.random.default_rng(seed)
    prompts = list(_prompts(run[0], rng))
    requests: list[TraceRequest] = []
    begin_s = 0.0
    for stage in run:
        lasts_s = _played_s(stage)
        gaps_s = rng.exponential(size=int(stage.rate_per_s * lasts_s))
        arrivals_s = begin_s + np.cumsum(gaps_s) * lasts_s / gaps_s.sum()
        for i, arrival_s in enumerate(arrivals_s.tolist()):
            num_tokens, hashes = prompts[i % len(prompts)]
            requests.append(
                TraceRequest(
                    f"{stage.stage}/{i}",
                    arrival_s,
                    num_tokens,
                    stage.output_tokens,
                    prefix_hashes=hashes,
                )
            )
        begin_s += lasts_s + _PAUSE_S
    return Trace.of(requests, run[0].run, prefix_block_tokens=BLOCK_SIZE)


def stage_of(request_id: str) -> int:
    return int(request_id.partition("/")[0])


def _played_s(stage: Stage) -> float:
    """Return how much of a stage is simulated: all of it if its server falls behind."""
    enough_s = max(_PLAYED_S, _PLAYED_REQUESTS / stage.rate_per_s)
    return stage.duration_s if stage.is_saturated else min(stage.duration_s, enough_s)


def _prompts(stage: Stage, rng: np.random.Generator) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield each prompt's length and the hashes of its full blocks, in the order of sending."""
    num_prompts = NUM_GROUPS * NUM_PROMPTS_PER_GROUP
    lengths = rng.integers(stage.prompt_min_tokens, stage.prompt_max_tokens + 1, num_prompts)
    num_shared = stage.system_prompt_tokens // BLOCK_SIZE
    for prompt in rng.permutation(num_prompts).tolist():
        length = int(lengths[prompt])
        group = prompt // NUM_PROMPTS_PER_GROUP
        hashes = (
            hash((group, i) if i < num_shared else (NUM_GROUPS + prompt, i))
            for i in range(length // BLOCK_SIZE)
        )
        yield length, tuple(hashes)
