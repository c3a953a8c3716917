"""What a C++ kernel for paged attention gains on a CPU: `python -m benchmarks.paged_kernel`.

The backends `sdpa` and `cpp` compute the attention of all layers of SmolLM2-135M in turns, on one
thread, and then make whole forward passes over the same batch.  All attention is compared with its
definition.  vLLM's build for CPUs has a kernel, too, which joins in where it is installed
(`make test-vllm` does so: `OMP_NUM_THREADS=1 .venv-vllm/bin/python -m benchmarks.paged_kernel`).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec

import torch
from torch import Tensor

from slosched.engine.torch import LoadedModel, load_model
from slosched.engine.torch.attention import AttentionBackend, Scoring, choose_backend
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
    "a chunk of 512 behind 1,500 tokens": ((512, 1500),),
}
OURS = ("sdpa", "cpp")
KERNELS = {16: "vec16", 128: "vec"}
"""vLLM's kernel by block size: that for our default size, and that for vLLM's own on CPUs."""
NUM_TURNS = 15


def attention_pass(case: Case, backend: AttentionBackend) -> Callable[[], Tensor]:
    """Return a function that plans and attends in every layer with a backend of slosched."""
    layers = [(case.k_cache.clone(), case.v_cache.clone()) for _ in range(NUM_LAYERS)]

    def attend() -> Tensor:
        plan = backend.plan(case.batch)
        for k_cache, v_cache in layers:
            out = plan.attend(case.query, k_cache, v_cache, SCORING)
        return out

    return attend


def vllm_pass(case: Case) -> Callable[[], Tensor]:
    """Return a function that does the same with vLLM's kernel, over caches of its own layout."""
    from vllm import _custom_ops as vllm_ops

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


def whole_pass(case: Case, model: LoadedModel, backend: AttentionBackend) -> Callable[[], Tensor]:
    """Return a function that makes the whole forward pass over the same batch."""
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
    return lambda: forward(model.model, step, cache, backend)


def error(out: Tensor, expected: Tensor) -> float:
    return float((out.float() - expected).norm() / expected.norm())


def cpu_s(attend: Callable[[], Tensor]) -> float:
    start_s = time.process_time()
    attend()
    return time.process_time() - start_s


def measure(name: str, dtype: torch.dtype, model: LoadedModel, *, has_vllm: bool) -> None:
    """Print the CPU times and the errors of one batch."""
    shape = replace(HEADS, tokens=BATCHES[name])
    case = make_case(shape, dtype)
    passes, expected = {}, {}
    for ours in OURS:
        backend = choose_backend(ours, torch.device("cpu"), model.geometry, 16)
        passes[ours] = attention_pass(case, backend)
        passes[f"the whole pass with {ours}"] = whole_pass(case, model, backend)
        expected[ours] = case.expected(SCORING)
    for size in KERNELS if has_vllm else ():
        theirs = make_case(replace(shape, block_size=size), dtype)
        passes[f"vLLM, blocks of {size}"] = vllm_pass(theirs)
        expected[f"vLLM, blocks of {size}"] = theirs.expected(SCORING)
    errors = {each: error(passes[each](), wanted) for each, wanted in expected.items()}
    seconds: dict[str, list[float]] = {each: [] for each in passes}
    for _ in range(NUM_TURNS):
        for each, attend in passes.items():
            seconds[each].append(cpu_s(attend))
    sys.stdout.write(f"{name}, {dtype}\n")
    for each, times in seconds.items():
        median_ms, least_ms = 1e3 * statistics.median(times), 1e3 * min(times)
        wrong = f", error {errors[each]:.1e}" if each in errors else ""
        sys.stdout.write(f"  {each}: {median_ms:.1f} CPU ms, {least_ms:.1f} least{wrong}\n")
    sys.stdout.flush()


def main() -> None:
    torch.set_num_threads(1)
    has_vllm = find_spec("vllm") is not None
    for dtype in (torch.float32, torch.bfloat16):
        kind = str(dtype).removeprefix("torch.")
        model = load_model("smollm2-135m", device="cpu", dtype=kind, num_threads=1)
        for name in BATCHES:
            with torch.inference_mode():
                measure(name, dtype, model, has_vllm=has_vllm)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()  # for --help
    main()
