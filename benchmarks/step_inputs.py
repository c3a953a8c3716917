"""How long the host prepares a step of the torch engine, before the device can begin.

    python benchmarks/step_inputs.py --num-decodes 256 --chunk-tokens 2048 --context-tokens 1000

The steps follow each other as in a server: every decode gets a token a step, and a block every 16.
"""

# ruff: noqa: T201

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator

import numpy as np
import torch

from slosched.core import Request, ScheduledChunk
from slosched.engine.torch import TorchExecutor, load_model

BLOCK_SIZE = 16


def steps(
    num_decodes: int, chunk_tokens: int, context_tokens: int, num_steps: int
) -> Iterator[list[ScheduledChunk]]:
    """Yield the chunks of consecutive steps, each with a new prompt beside the same decodes."""
    most_blocks = -(-(2 * context_tokens + num_steps) // BLOCK_SIZE) + 1
    rng = np.random.default_rng(0)
    blocks = rng.permutation(num_decodes * most_blocks).reshape(num_decodes, most_blocks).tolist()
    decodes = []
    for i, prompt_tokens in enumerate(rng.integers(1, 2 * context_tokens, num_decodes).tolist()):
        request = Request(f"decode-{i}", 0.0, prompt_tokens, max_tokens=num_steps + 1)
        request.prompt_token_ids = list(range(prompt_tokens))
        request.output_token_ids.append(7)
        decodes.append(request)
    tables = [blocks[i][: -(-r.num_prompt_tokens // BLOCK_SIZE)] for i, r in enumerate(decodes)]
    prompt = rng.integers(0, 50_000, chunk_tokens).tolist()
    chunk_table = list(range(-(-chunk_tokens // BLOCK_SIZE)))
    for step in range(num_steps):
        chunks = []
        for i, request in enumerate(decodes):
            prior = request.num_prompt_tokens + step
            if prior % BLOCK_SIZE == 0:
                tables[i].append(blocks[i][len(tables[i])])
            chunks.append(ScheduledChunk(request, 1, prior, True, tables[i]))
        if chunk_tokens:
            new = Request(f"chunk-{step}", 0.0, chunk_tokens, max_tokens=8, prompt_token_ids=prompt)
            chunks.append(ScheduledChunk(new, chunk_tokens, 0, True, chunk_table))
        yield chunks
        for request in decodes:
            request.output_token_ids.append(step)


def measure(num_decodes: int, chunk_tokens: int, context_tokens: int, num_steps: int) -> None:
    """Print the median and the least time of a step's preparation, the first steps left out."""
    torch.set_num_threads(1)
    model = load_model("tiny-random", device="cpu", dtype="float32")
    executor = TorchExecutor(model, num_blocks=8, block_size=BLOCK_SIZE)
    seconds = []
    for chunks in steps(num_decodes, chunk_tokens, context_tokens, num_steps):
        start_s = time.perf_counter()
        with torch.inference_mode():  # as in a step
            executor.prepare(chunks)
        seconds.append(time.perf_counter() - start_s)
        for chunk in chunks[num_decodes:]:
            executor.release(chunk.request.request_id)
    warm_ms = 1e3 * np.array(seconds[num_steps // 5 :])
    print(
        f"{num_decodes} decodes of about {context_tokens} tokens and a chunk of {chunk_tokens}: "
        f"median {np.median(warm_ms):.3f} ms, least {warm_ms.min():.3f} ms of {len(warm_ms)} steps"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-decodes", type=int, default=256)
    parser.add_argument("--chunk-tokens", type=int, default=2048)
    parser.add_argument("--context-tokens", type=int, default=1000)
    parser.add_argument("--num-steps", type=int, default=200)
    measure(**vars(parser.parse_args()))
