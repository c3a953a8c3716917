"""What a C++ kernel for paged attention gains on a CPU: `python -m benchmarks.paged_kernel`.

vLLM's build for CPUs has such a kernel, so run this in an environment with that vLLM
(`make test-vllm` makes one: `OMP_NUM_THREADS=1 .venv-vllm/bin/python -m benchmarks.paged_kernel`).
The kernel and the backend `sdpa` compute the attention of all layers of SmolLM2-135M in turns, on
one thread, and both are compared with the definition of attention.  A whole forward pass over
the same batch tells the most that a step could gain.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from vllm import _custom_ops as vllm_ops

from slosched.engine.torch import LoadedModel, load_model
from slosched.engine.torch.attention.backend import Scoring
from slosched.engine.torch.attention.sdpa import SdpaBackend
from slosched.engine.torch.conformance import Case, Shape, make_case
from slosched.engine.torch.forward import forward
from slosched.engine.torch.kv_cache import PagedKVCache
from slosched.engine.torch.step_inputs import StepInputs

NUM_LAYERS, HEADS = 30, Shape(num_heads=9, num_kv_heads=3, head_dim=64)
SCORING = Scoring(scale=64**-0.5, window=None)
BATCHES: dict[str, tuple[tuple[int, int], ...]] = {
    "8 decodes at 350 tokens": ((1, 349),) * 8,
    "8 decodes at 2,000 tokens": ((1, 1999),) * 8,
    "a chunk of 512 beside 8 decodes at 350 tokens": ((512, 0), *((1, 349),) * 8),
}
KERNELS = {16: "vec16", 128: "vec"}
"""vLLM's kernel by block size: that for our default size, and that for vLLM's own on CPUs."""
NUM_TURNS = 15


def sdpa_pass(case: Case) -> Callable[[], Tensor]:
    """Return a function that plans and attends in every layer with `sdpa`."""
    layers = [(case.k_cache.clone(), case.v_cache.clone()) for _ in range(NUM_LAYERS)]

    def attend() -> Tensor:
        plan = SdpaBackend().plan(case.batch)
        for k_cache, v_cache in layers:
            out = plan.attend(case.query, k_cache, v_cache, SCORING)
        return out

    return attend


def vllm_pass(case: Case) -> Callable[[], Tensor]:
    """Return a function that does the same with vLLM's kernel, over caches of its own layout."""
    num_blocks, block_size, num_kv_heads, head_dim = case.k_cache.shape
    kernel, query = KERNELS[block_size], case.query.contiguous()
    num_heads, dtype = query.shape[1], query.dtype
    slots = torch.tensor(
        [
            table[place // block_size] * block_size + place % block_size
            for num_new, num_prior, table in zip(*case.spans, strict=True)
            for place in range(num_new + num_prior)
        ]
    )
    layers = []
    for _ in range(NUM_LAYERS):
        both = torch.zeros(num_blocks, num_kv_heads, 2 * block_size, head_dim, dtype=dtype)
        k_cache, v_cache = both.chunk(2, dim=2)
        keys, values = (c.flatten(0, 1)[slots] for c in (case.k_cache, case.v_cache))
        vllm_ops.cpu_attn_reshape_and_cache(keys, values, k_cache, v_cache, slots, kernel)
        layers.append((k_cache, v_cache))
    batch = case.batch

    def attend() -> Tensor:
        plan = vllm_ops.cpu_attn_get_scheduler_metadata(
            num_reqs=len(batch.num_new_tokens),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            seq_lens=batch.context_lens,
            dtype=dtype,
            query_start_loc=batch.query_starts,
            causal=True,
            sliding_window_size=-1,
            isa=kernel,
            enable_kv_split=True,
        )
        out = torch.empty_like(query)
        for k_cache, v_cache in layers:
            vllm_ops.cpu_attention_with_kv_cache(
                query=query,
                key_cache=k_cache,
                value_cache=v_cache,
                output=out,
                query_start_loc=batch.query_starts,
                seq_lens=batch.context_lens,
                scale=SCORING.scale,
                causal=True,
                alibi_slopes=None,
                sliding_window=-1,
                block_table=batch.block_tables,
                softcap=0,
                scheduler_metadata=plan,
                s_aux=None,
            )
        return out

    return attend


def whole_pass(case: Case, model: LoadedModel) -> Callable[[], Tensor]:
    """Return a function that makes the whole forward pass over the same batch with `sdpa`."""
    num_blocks, block_size = case.k_cache.shape[:2]
    cache = PagedKVCache(model.geometry, num_blocks=num_blocks, block_size=block_size)
    for layer in range(NUM_LAYERS):
        for part in cache.layer(layer):
            part.zero_()
    num_sequences, num_tokens = len(case.spans[0]), len(case.query)
    ends = case.batch.query_starts[1:].tolist()
    inputs = StepInputs(block_size, torch.device("cpu"))
    ids = [1 + token % 999 for token in range(num_tokens)]
    step = inputs.fill(range(num_sequences), case.spans, ids, [end - 1 for end in ends])
    return lambda: forward(model.model, step, cache, SdpaBackend())


def error(out: Tensor, expected: Tensor) -> float:
    return float((out.float() - expected).norm() / expected.norm())


def cpu_s(attend: Callable[[], Tensor]) -> float:
    start_s = time.process_time()
    attend()
    return time.process_time() - start_s


def measure(name: str, dtype: torch.dtype, model: LoadedModel) -> None:
    """Print the CPU times of one batch, what the kernel saves of a step, and the errors."""
    shape = replace(HEADS, tokens=BATCHES[name])
    cases = {size: make_case(replace(shape, block_size=size), dtype) for size in KERNELS}
    passes = {
        "sdpa": sdpa_pass(cases[16]),
        **{f"vLLM, blocks of {size}": vllm_pass(case) for size, case in cases.items()},
        "the whole pass": whole_pass(cases[16], model),
    }
    expected = {size: case.expected(SCORING) for size, case in cases.items()}
    errors = [error(passes["sdpa"](), expected[16])]
    errors += [error(passes[f"vLLM, blocks of {size}"](), expected[size]) for size in KERNELS]
    seconds: dict[str, list[float]] = {each: [] for each in passes}
    for _ in range(NUM_TURNS):
        for each, attend in passes.items():
            seconds[each].append(cpu_s(attend))
    ms = {each: 1e3 * statistics.median(times) for each, times in seconds.items()}
    sys.stdout.write(f"{name}, {dtype}\n")
    for each, times in seconds.items():
        gain = (ms["sdpa"] - ms[each]) / ms["the whole pass"]
        saved = f"; {gain:+.1%} of the pass saved" if each.startswith("vLLM") else ""
        sys.stdout.write(f"  {each}: {ms[each]:.1f} CPU ms, {1e3 * min(times):.1f} least{saved}\n")
    sys.stdout.write(f"  errors: {', '.join(f'{one:.1e}' for one in errors)}\n")


def main() -> None:
    torch.set_num_threads(1)
    for dtype in (torch.float32, torch.bfloat16):
        kind = str(dtype).removeprefix("torch.")
        model = load_model("smollm2-135m", device="cpu", dtype=kind, num_threads=1)
        for name in BATCHES:
            with torch.inference_mode():
                measure(name, dtype, model)


if __name__ == "__main__":
    main()
