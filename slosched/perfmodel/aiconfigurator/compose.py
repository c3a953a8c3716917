"""A profile of whole steps, composed from operator times, with where they come from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from slosched.perfmodel.aiconfigurator.deployment import BACKENDS, DEVICES, Deployment
from slosched.perfmodel.aiconfigurator.operators import OperatorTables
from slosched.perfmodel.aiconfigurator.package import (
    VERSION,
    CompiledModel,
    KVRoom,
    compile_model,
    kv_room,
    no_tables,
    peaks_of,
)
from slosched.perfmodel.aiconfigurator.plausibility import check_tables
from slosched.perfmodel.aiconfigurator.sampling import TOP_P_SAID, TopPSampling
from slosched.perfmodel.measurement import Chunk, Measurement, Part, Profile
from slosched.perfmodel.memory import KV_CAPACITY_SHARE
from slosched.perfmodel.peaks import Peaks
from slosched.perfmodel.profiled_range import LARGEST_STEP_TOKENS
from slosched.perfmodel.stress import StressLimits, stress_batches
from slosched.perfmodel.swap import KV_BYTES_PER_TOKEN

MAX_NUM_BATCHED_TOKENS = 8192
MAX_NUM_SEQS = 512

NOT_IN_IT = (
    "how prefill and decode disturb each other in one batch: the sum is additive by construction; "
    "launch gaps, CUDA graphs, scheduling and sampling on the CPU; KV swap"
)
_JOINT_KERNEL = ("a100_sxm", "l40s")
_JOINT_CAVEAT = (
    "; vLLM runs FlashAttention-2 on this GPU, one kernel for chunks and decodes: on another GPU "
    "with it such sums were 11 to 15 % off mixed steps on average, mostly too short"
)
_METHOD = (
    "sum of interpolated operator times by slosched.perfmodel.aiconfigurator; a chunk's prior "
    "context was not measured but scaled from the attention of the whole sequence, and never below "
    "the chunk alone or one decode that reads the same keys; decodes of unequal context count with "
    "their mean"
)
_TILE_EDGES = (16, 64, 128)
"""Tokens between two tile edges: up to 256 tokens, up to 1024, and beyond."""


def compose_profile(
    deployment: Deployment,
    *,
    max_num_batched_tokens: int = MAX_NUM_BATCHED_TOKENS,
    max_num_seqs: int = MAX_NUM_SEQS,
    num_steps: int = 160,
    seed: int = 0,
) -> Profile:
    """Compose `num_steps` stress batches, and the layers at every tile edge, from the tables.

    Raises MissingTablesError if the package is absent or knows no such system, model or backend,
    ConfigMissingError if the model's config.json cannot be had, and NoRoomError if the model does
    not fit.
    """
    compiled = compile_model(deployment)
    room = kv_room(deployment, compiled, max_num_batched_tokens, max_num_seqs)
    limits = StressLimits(
        max_num_batched_tokens, max_num_seqs, kv_capacity_tokens=room.capacity_tokens
    )
    try:
        tables = with_sampling(compiled.tables(), deployment, compiled, peaks_of(deployment.system))
        measurements = composed_measurements(tables, limits, num_steps, seed)
    except (RuntimeError, ValueError) as error:  # the tables lack one of the operators
        raise no_tables(deployment, error) from error
    facts = provenance(deployment, compiled, room, limits)
    return Profile(measurements, {**facts, "plausibility": check_tables(deployment, compiled).said})


def with_sampling(
    tables: OperatorTables, deployment: Deployment, compiled: CompiledModel, peaks: Peaks
) -> OperatorTables:
    """Return the tables with the time of sampling, if the deployment samples with top-p."""
    if not deployment.samples_top_p:
        return tables
    vocabulary = compiled.num_logits() * deployment.tensor_parallel
    return replace(tables, sampling=TopPSampling(vocabulary, peaks.bytes_per_s))


def composed_measurements(
    tables: OperatorTables, limits: StressLimits, num_steps: int, seed: int
) -> tuple[Measurement, ...]:
    """Compose the layers at every tile edge, and then the steps."""
    layers = [
        Measurement(batch, tables.layers_s(batch), part=Part.LAYERS)
        for batch in layer_batches(limits)
    ]
    batches = stress_batches(limits, num_steps, seed)
    return (*layers, *(Measurement(batch, tables.step_s(batch)) for batch in batches))


def layer_batches(limits: StressLimits) -> list[tuple[Chunk, ...]]:
    """List batches of one chunk, then batches of decodes, at both sides of every GEMM tile edge."""
    sizes = _sizes(limits.max_num_batched_tokens)
    return [((size, 0),) for size in sizes] + [
        ((1, 0),) * size for size in sizes if 1 < size <= limits.max_num_seqs
    ]


def _sizes(largest: int) -> list[int]:
    """List the sizes 1 … 17, then m and m + 1 for every tile edge m, where times jump.

    Between the edges times are nearly linear.
    """
    fine, middle, coarse = _TILE_EDGES
    edges = [*range(fine, 256, fine), *range(256, 1024, middle), *range(1024, largest + 1, coarse)]
    sizes = {*range(1, fine), *edges, *(edge + 1 for edge in edges), largest}
    return sorted(size for size in sizes if size <= largest)


def provenance(
    deployment: Deployment, compiled: CompiledModel, room: KVRoom, limits: StressLimits
) -> dict[str, str]:
    """Return what a profile says of where its steps come from."""
    system, model = deployment.system, deployment.model
    is_joint = deployment.backend == "vllm" and system in _JOINT_KERNEL
    share = f"{room.memory_share:.4g}"
    return {
        "gpu": DEVICES.get(system, system),
        "num_gpus": str(deployment.tensor_parallel),
        "model": Path(model).resolve().name if Path(model).is_dir() else model,
        "engine": f"{BACKENDS[deployment.backend]} {compiled.version}, {_dtypes(compiled)}, "
        f"{deployment.parallelism}",
        "origin": "AIConfigurator, additive",
        "source": f"aiconfigurator-core {VERSION}, tables of {system}",
        "licence": "Apache-2.0 (Copyright (c) 2025-2026 NVIDIA CORPORATION & AFFILIATES)",
        "method": _METHOD,
        "range": f"up to {limits.max_num_batched_tokens} tokens and {limits.max_num_seqs} requests "
        f"a step, contexts up to {limits.max_context_tokens} tokens",
        LARGEST_STEP_TOKENS: str(limits.max_num_batched_tokens),
        "not_in_it": NOT_IN_IT + (_JOINT_CAVEAT if is_joint else ""),
        "kv_capacity_tokens": str(room.capacity_tokens),
        "kv_capacity_origin": f"AIConfigurator's estimate: {share} of the memory less weights, "
        "activations and a margin of some GB",
        KV_CAPACITY_SHARE: share,
        KV_BYTES_PER_TOKEN: str(room.bytes_per_token),
        **({"sampling": TOP_P_SAID} if deployment.samples_top_p else {}),
        **_experts(compiled),
    }


def _experts(compiled: CompiledModel) -> dict[str, str]:
    """Return how many experts a layer has and how many compute a token, if it has any."""
    found = (op.settings for op in compiled.prefill if op.kind == "Moe")
    return {
        name: str(settings[key])
        for settings in found
        for name, key in (("num_experts", "num_experts"), ("num_experts_per_token", "topk"))
    }


def _dtypes(compiled: CompiledModel) -> str:
    """Return the dtypes in words: one if all are the same."""
    kinds = dict(compiled.dtypes)
    if len(set(kinds.values())) == 1:
        return kinds["weights"]
    return ", ".join(f"{dtype} {part}" for part, dtype in kinds.items())
