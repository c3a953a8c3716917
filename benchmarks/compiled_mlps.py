"""What torch.compile gains on a CPU: `python -m benchmarks.compiled_mlps`.

Eight requests to SmolLM2-135M are answered at once, in float32 on one thread: with the matrices
packed for oneDNN, as `slosched serve` has them, with plain ones, and with plain ones in MLPs
that inductor has compiled to C++.  The first answers of each compile and warm up and are
timed apart.  The tokens have to be equal.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from copy import deepcopy
from dataclasses import replace

from slosched.core import Limits, Request, SamplingParams
from slosched.engine.loop import Engine, MonotonicClock
from slosched.engine.torch import LoadedModel, TorchExecutor, load_model
from slosched.kv import KVCache
from slosched.policy import FCFS
from slosched.scheduler import Scheduler

NUM_REQUESTS, NUM_PROMPT_TOKENS, NUM_OUTPUT_TOKENS = 8, 200, 32
NUM_TURNS = 3


def answers(model: LoadedModel) -> tuple[list[float], list[list[int]]]:
    """Return the processor's seconds in each step of decodes alone, and the tokens by request."""
    num_blocks = NUM_REQUESTS * (NUM_PROMPT_TOKENS + NUM_OUTPUT_TOKENS + 16) // 16
    scheduler = Scheduler(FCFS(), KVCache(num_blocks), Limits())
    engine = Engine(scheduler, TorchExecutor(model, num_blocks=num_blocks), MonotonicClock())
    prompts = [[1 + (7 * i + j) % 9999 for j in range(NUM_PROMPT_TOKENS)] for i in range(8)]
    requests = [
        Request(
            *(f"r{i}", 0.0, NUM_PROMPT_TOKENS, NUM_OUTPUT_TOKENS),
            prompt_token_ids=prompt,
            sampling=SamplingParams(ignore_eos=True),
        )
        for i, prompt in enumerate(prompts)
    ]
    for request in requests:
        scheduler.add_request(request)
    while not all(request.num_output_tokens for request in requests):
        engine.step()
    seconds = []
    while engine.has_work:
        start_s = time.process_time()
        engine.step()
        seconds.append(time.process_time() - start_s)
    return seconds, [request.output_token_ids for request in requests]


def main() -> None:
    packed = load_model("smollm2-135m", device="cpu", dtype="float32", num_threads=1)
    plain = replace(packed, model=deepcopy(packed.model))
    compiled = replace(packed, model=deepcopy(packed.model))
    for layer in compiled.model.model.layers:
        layer.mlp.compile(dynamic=True)
    models = {"packed": packed, "plain": plain, "compiled": compiled}
    expected, seconds = None, dict[str, list[float]]()
    for name, model in models.items():
        start_s = time.monotonic()
        tokens = answers(model)[1]
        sys.stdout.write(f"{name}: the first answers took {time.monotonic() - start_s:.1f} s\n")
        assert tokens == (expected := expected or tokens), f"{name}: other tokens"
        seconds[name] = []
    for _ in range(NUM_TURNS):
        for name, model in models.items():
            seconds[name] += answers(model)[0]
    for name, each in seconds.items():
        sys.stdout.write(
            f"{name}: a step of {NUM_REQUESTS} decodes takes {1e3 * statistics.median(each):.1f} "
            f"CPU ms in the median of {len(each)}, {1e3 * min(each):.1f} at least\n"
        )


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()  # for --help
    main()
