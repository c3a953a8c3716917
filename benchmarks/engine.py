"""The torch engine beside transformers' own `generate` and its continuous batching, on a CPU.

    python benchmarks/engine.py                    # 16 requests, 8 at once, and one request alone
    python benchmarks/engine.py --turns 3 --attention sdpa

All compute greedily in float32 on one thread, and must emit the same tokens. transformers gets the
model as it loads it itself, without packed weights. What counts is CPU seconds of the process,
since these depend least on what else the machine does. The engines take turns; a ratio is the
median over the turns.
"""

# ruff: noqa: T201

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from statistics import median
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from slosched.core import Limits, Request, SamplingParams
from slosched.engine.loop import Engine, MonotonicClock
from slosched.engine.torch import LoadedModel, TorchExecutor, load_model
from slosched.kv import KVCache
from slosched.policy.spec import make_policy
from slosched.scheduler import Scheduler

BLOCK_SIZE = 16
MAX_STEP_TOKENS = 256
Prompts = Sequence[Sequence[int]]


def slosched_tokens(
    model: LoadedModel, prompts: Prompts, num_tokens: int, at_once: int
) -> list[list[int]]:
    """Return the tokens of slosched's engine under the policy `sarathi`."""
    num_blocks = sum(-(-(len(prompt) + num_tokens) // BLOCK_SIZE) for prompt in prompts)
    executor = TorchExecutor(model, num_blocks=num_blocks, block_size=BLOCK_SIZE)
    limits = Limits(max_num_batched_tokens=MAX_STEP_TOKENS, max_num_seqs=at_once)
    scheduler = Scheduler(make_policy("sarathi"), KVCache(num_blocks, BLOCK_SIZE), limits, None)
    clock = MonotonicClock()
    requests = [
        Request(
            f"r{i}",
            clock.now_s(),
            len(prompt),
            num_tokens,
            prompt_token_ids=prompt,
            sampling=SamplingParams(ignore_eos=True),
        )
        for i, prompt in enumerate(prompts)
    ]
    engine = Engine(scheduler, executor, clock)
    for request in requests:
        scheduler.add_request(request)
    while engine.has_work:
        engine.step()
    return [request.output_token_ids for request in requests]


def batched_tokens(model: Any, prompts: Prompts, num_tokens: int, at_once: int) -> list[list[int]]:
    """Return the tokens of transformers' continuous batching."""
    config = ContinuousBatchingConfig(
        max_batch_tokens=MAX_STEP_TOKENS,
        max_requests_per_batch=at_once,
        num_blocks=sum(-(-(len(prompt) + num_tokens) // 256) for prompt in prompts),
    )
    answers = model.generate_batch(
        [list(prompt) for prompt in prompts],
        generation_config=GenerationConfig(max_new_tokens=num_tokens, do_sample=False),
        continuous_batching_config=config,
    )
    # Requests are named in the order in which they were given.
    names = sorted(answers, key=lambda name: int(name.rsplit("_", 1)[-1]))
    return [list(answers[name].generated_tokens) for name in names]


def generated_tokens(
    model: Any, prompts: Prompts, num_tokens: int, _at_once: int
) -> list[list[int]]:
    """Return the tokens of `generate`, one prompt after the other."""
    found = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
        )
        found.append(out[0, len(prompt) :].tolist())
    return found


def cpu_seconds(engine: Callable[[], list[list[int]]]) -> tuple[float, list[list[int]]]:
    """Return the process's CPU seconds for all prompts, and the tokens."""
    start_s = time.process_time()
    tokens = engine()
    return time.process_time() - start_s, tokens


def compare(name: str, attention: str, turns: int, num_tokens: int) -> None:
    """Print the CPU seconds of every engine and turn, and the medians of the ratios."""
    model = load_model(name, device="cpu", dtype="float32", num_threads=1, attention=attention)
    plain = deepcopy(model.model)  # a copy has plain layers
    generator = torch.Generator().manual_seed(0)
    lengths = torch.linspace(32, 400, 16).long()[torch.randperm(16, generator=generator)].tolist()
    prompts = [torch.randint(100, 40_000, (n,), generator=generator).tolist() for n in lengths]
    prompts = [[token % model.vocab_size for token in prompt] for prompt in prompts]
    cases = (
        ("one request alone", generated_tokens, "sdpa", [prompts[0]], 1),
        ("16 requests, 8 at once", batched_tokens, "paged|sdpa", prompts, 8),
    )
    for title, theirs, implementation, given, at_once in cases:
        plain.set_attn_implementation(implementation)
        ratios = []
        for _ in range(turns):
            ours_s, ours = cpu_seconds(partial(slosched_tokens, model, given, num_tokens, at_once))
            theirs_s, expected = cpu_seconds(partial(theirs, plain, given, num_tokens, at_once))
            alike = sum(a[:num_tokens] == b for a, b in zip(ours, expected, strict=True))
            ratios.append(theirs_s / ours_s)
            print(
                f"{title}: slosched {ours_s:.2f} CPU s, transformers {theirs_s:.2f} "
                f"({theirs.__name__}), {alike} of {len(given)} answers alike",
                flush=True,
            )
        print(f"{title}: slosched is {median(ratios):.2f} times as fast")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", dest="name", default="smollm2-135m")
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--num-tokens", type=int, default=48)
    compare(**vars(parser.parse_args()))
