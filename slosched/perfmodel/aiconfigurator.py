"""Step times composed from NVIDIA AIConfigurator's measured operator tables.

The tables come with the package `aiconfigurator-core`, an optional extra of slosched.  A step of T
tokens of S requests takes

    rest(T) + logits(S) + Σ chunk attention(chunk, prior) + decode attention(B, mean context)

The sum is additive by construction: nothing in it knows how prefill and decode disturb each other.
GEMMs, all-reduces, decode attention, and prefill attention without prior context are measured;
norms and activations are formulas of AIConfigurator.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module, metadata
from itertools import count
from types import ModuleType
from typing import Any, Protocol

from slosched.core import SloschedError
from slosched.perfmodel.measurement import Chunk, Measurement, Part, Profile
from slosched.perfmodel.stress import StressLimits, stress_batches

VERSION = "0.12.0"
"""Version of aiconfigurator-core: the last of its release line, so that the numbers do not change.
"""

DEVICES = {
    "a100_sxm": "NVIDIA A100-SXM4-80GB",
    "b200_sxm": "NVIDIA B200",
    "h100_sxm": "NVIDIA H100 80GB HBM3",
    "h200_sxm": "NVIDIA H200",
    "l40s": "NVIDIA L40S",
}
"""The name that CUDA gives the GPU, by AIConfigurator's name of the system."""

_BACKENDS = {"vllm": "vLLM", "sglang": "SGLang", "trtllm": "TensorRT-LLM"}

_NOT_IN_IT = (
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
_MEMORY_FRACTION = 0.9
_TILE_EDGES = (16, 64, 128)
"""Tokens between two tile edges: up to 256 tokens, up to 1024, and beyond."""

OperatorTime = tuple[str, float, float, str]
"""Name, milliseconds, energy, and where it comes from ("silicon", "empirical", "mixed")."""


class MissingTablesError(SloschedError):
    """AIConfigurator is not installed, or has no tables for what was asked."""


class OperatorEngine(Protocol):
    """The part of AIConfigurator's EngineHandle that is used here: operator times by index."""

    def evaluate_context_ops(
        self, indices: list[int], *, batch_size: int, s: int, prefix: int = 0, x: int | None = None
    ) -> list[OperatorTime]: ...

    def evaluate_generation_ops(
        self, indices: list[int], *, batch_size: int, s: int
    ) -> list[OperatorTime]: ...


@dataclass(frozen=True)
class Deployment:
    """A model on a GPU, by AIConfigurator's names."""

    system: str
    model: str
    backend: str = "vllm"
    tensor_parallel: int = 1

    def __post_init__(self) -> None:
        if self.backend not in _BACKENDS:
            raise ValueError(
                f"AIConfigurator has no backend {self.backend!r}; it has {', '.join(_BACKENDS)}"
            )


@dataclass(frozen=True)
class OperatorTables:
    """The operators of one deployment; all times in seconds."""

    engine: OperatorEngine
    prefill_attention: int
    rest: tuple[int, ...]
    """The prefill operators that depend on the number of tokens alone."""
    decode_attention: int
    logits: int
    """The output projection among the decode operators; not every model's prefill lists it."""

    @classmethod
    def of(cls, engine: OperatorEngine) -> OperatorTables:
        prefill = _names(engine.evaluate_context_ops)
        decode = _names(engine.evaluate_generation_ops)
        attention = _only(prefill, "context_attention")
        apart = ("context_attention", "context_logits_gemm")
        return cls(
            engine,
            prefill_attention=attention,
            rest=tuple(i for i, name in enumerate(prefill) if name not in apart),
            decode_attention=_only(decode, "generation_attention"),
            logits=_only(decode, "generation_logits_gemm"),
        )

    def layers_s(self, chunks: Sequence[Chunk]) -> float:
        """Return the seconds of a batch without its attention."""
        tokens = sum(new for new, _ in chunks)
        rest = self.engine.evaluate_context_ops(list(self.rest), batch_size=1, s=tokens, x=tokens)
        return _seconds(rest) + self._decode_s(self.logits, len(chunks), 1)

    def chunk_attention_s(self, num_new_tokens: int, num_prior_tokens: int) -> float:
        """Return the seconds of one prefill chunk's attention.

        The time is scaled from a measured one, and is at least that of two measured parts of its
        work: the chunk without prior context, and one decode that reads as many keys.
        """
        alone_s = self._prefill_attention_s(num_new_tokens, 0)
        if not num_prior_tokens:
            return alone_s
        scaled_s = self._prefill_attention_s(num_new_tokens, num_prior_tokens)
        return max(alone_s, scaled_s, self.decode_attention_s(1, num_new_tokens + num_prior_tokens))

    def decode_attention_s(self, num_decodes: int, context_tokens: int) -> float:
        """Return the seconds of the decodes' attention; contexts include the computed token."""
        return self._decode_s(self.decode_attention, num_decodes, context_tokens)

    def step_s(self, chunks: Sequence[Chunk]) -> float:
        """Return the seconds of a whole step."""
        seconds = self.layers_s(chunks)
        seconds += sum(self.chunk_attention_s(*chunk) for chunk in chunks if chunk[0] > 1)
        contexts = [prior + 1 for new, prior in chunks if new == 1]
        if contexts:
            seconds += self.decode_attention_s(len(contexts), round(sum(contexts) / len(contexts)))
        return seconds

    def _prefill_attention_s(self, num_new_tokens: int, num_prior_tokens: int) -> float:
        return _seconds(
            self.engine.evaluate_context_ops(
                [self.prefill_attention], batch_size=1, s=num_new_tokens, prefix=num_prior_tokens
            )
        )

    def _decode_s(self, index: int, num_decodes: int, context_tokens: int) -> float:
        return _seconds(
            self.engine.evaluate_generation_ops([index], batch_size=num_decodes, s=context_tokens)
        )


def compose_profile(
    deployment: Deployment,
    *,
    num_steps: int = 160,
    seed: int = 0,
    limits: StressLimits | None = None,
) -> Profile:
    """Compose `num_steps` stress batches, and the layers at every tile edge, from the tables.

    Raises MissingTablesError if the package is absent or knows no such system, model or backend.
    """
    engine, facts = _open(deployment)
    tables = OperatorTables.of(engine)
    limits = limits or StressLimits(kv_capacity_tokens=int(facts["kv_capacity_tokens"]))
    layers = [
        Measurement(batch, tables.layers_s(batch), part=Part.LAYERS)
        for batch in layer_batches(limits)
    ]
    steps = [
        Measurement(batch, tables.step_s(batch))
        for batch in stress_batches(limits, num_steps, seed)
    ]
    return Profile((*layers, *steps), facts)


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


def _names(evaluate: Any) -> list[str]:
    """Return the names of all operators by index; AIConfigurator itself offers no list of them."""
    names: list[str] = []
    for index in count():
        try:
            rows = evaluate([index], batch_size=1, s=1)
        except ValueError:  # past the end
            return names
        names.append(rows[0][0])
    raise AssertionError("unreachable")


def _only(names: Sequence[str], wanted: str) -> int:
    if names.count(wanted) != 1:
        raise MissingTablesError(
            f"a step can only be composed of a model with one operator {wanted!r}, not "
            f"{names.count(wanted)}; AIConfigurator's has {', '.join(names)}"
        )
    return names.index(wanted)


def _seconds(operators: Iterable[OperatorTime]) -> float:
    return sum(milliseconds for _, milliseconds, _, _ in operators) / 1e3


def _package() -> tuple[ModuleType, ModuleType, ModuleType]:
    """Return the modules of AIConfigurator that compile tables, estimate memory and know versions.

    Raises MissingTablesError if the package is absent or has another version than `VERSION`.
    """
    remedy = "pip install 'slosched[aiconfigurator]'"
    try:
        names = ("engine", "memory", "perf_database")
        engine, memory, database = (import_module(f"aiconfigurator_core.sdk.{n}") for n in names)
        installed = metadata.version("aiconfigurator-core")
    except ImportError as error:
        raise MissingTablesError(
            f"AIConfigurator's tables need an extra ({error}): {remedy}"
        ) from error
    if installed != VERSION:
        raise MissingTablesError(
            f"aiconfigurator-core {installed} is installed and may not say what {VERSION} says, "
            f"which slosched was checked with: {remedy}"
        )
    return engine, memory, database


def _open(deployment: Deployment) -> tuple[OperatorEngine, dict[str, str]]:
    """Return the compiled tables and their provenance."""
    compiler, memory, database = _package()
    system, model, backend = deployment.system, deployment.model, deployment.backend
    # At each start it warns about every table that it reads from a neighbouring version.
    logging.getLogger("aiconfigurator_core").setLevel(logging.ERROR)
    try:
        version = database.resolve_query_version(system, backend, "current")
        tp = deployment.tensor_parallel
        engine = compiler.EngineHandle.compile(model, system, backend, tp_size=tp)
        kv_cache = memory.estimate_kv_cache(
            model,
            system,
            backend,
            version,
            tp_size=tp,
            max_num_tokens=8192,
            max_batch_size=512,
            memory_fraction_kind="of_free" if backend == "trtllm" else "of_total",
            memory_fraction_value=_MEMORY_FRACTION,
        )
    except Exception as error:
        raise MissingTablesError(
            f"AIConfigurator {VERSION} has no tables of {model!r} on {system!r} with {backend!r}, "
            f"tensor parallel {deployment.tensor_parallel}: {error}"
        ) from error
    return engine, _provenance(deployment, version, int(kv_cache["total_kv_size_tokens"]))


def _provenance(deployment: Deployment, version: str, kv_tokens: int) -> dict[str, str]:
    tp = deployment.tensor_parallel
    is_joint = deployment.backend == "vllm" and deployment.system in _JOINT_KERNEL
    return {
        "gpu": DEVICES.get(deployment.system, deployment.system),
        "num_gpus": str(tp),
        "model": deployment.model,
        "engine": f"{_BACKENDS[deployment.backend]} {version}, bfloat16, tensor parallel {tp}",
        "origin": "AIConfigurator, additive",
        "source": f"aiconfigurator-core {VERSION}, tables of {deployment.system}",
        "licence": "Apache-2.0 (Copyright (c) 2025-2026 NVIDIA CORPORATION & AFFILIATES)",
        "method": _METHOD,
        "range": "up to 8192 tokens and 512 requests a step, contexts up to 32768 tokens",
        "not_in_it": _NOT_IN_IT + (_JOINT_CAVEAT if is_joint else ""),
        "kv_capacity_tokens": str(kv_tokens),
        "kv_capacity_origin": f"AIConfigurator's estimate: {_MEMORY_FRACTION} of the memory less "
        "weights, activations and a margin of some GB",
    }
