"""Whether a backend's tables can be right for a model, and a comparison of the backends.

The tables of a backend are plausible for a model if

1. decode attention was measured with as many heads on each GPU as the model has there.  Otherwise
   AIConfigurator scales the time from other numbers of heads; and
2. decode attention reads the keys and values of 64 requests of 4,096 tokens at no more than 95 % of
   the memory's bandwidth.  No kernel is faster; such a time was cut off at the limit; and
3. experts take for no number of tokens up to 256 over 10 % longer than for a larger one.  An engine
   could add idle tokens and be faster, so the kernel was not tuned for the sizes in between.

The first rule is due to Llama-2-7B on an H100.  vLLM's tables have 1, 2, 4 and 8 heads that share
no keys, but not its 32.  For 8 to 32 requests they are 1.4 to 1.6 times as slow as those of SGLang
and TensorRT-LLM, which have 32.  The second is due to the tables of TensorRT-LLM on the A100, which
read at 98 to 100 %.  The third is due to Mixtral-8x7B on two H100s, where vLLM's experts take
22.1 ms for 80 tokens and 18.2 ms for 256, and those of TensorRT-LLM 32.1 ms for 96 tokens and
17.8 ms for 128.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from slosched.perfmodel.aiconfigurator.deployment import BACKENDS, Deployment
from slosched.perfmodel.aiconfigurator.errors import MissingTablesError
from slosched.perfmodel.aiconfigurator.operators import OperatorTables
from slosched.perfmodel.aiconfigurator.package import (
    CompiledModel,
    Operator,
    compile_model,
    measured_heads,
    no_tables,
    peaks_of,
)
from slosched.perfmodel.measurement import Chunk

_MOST_BANDWIDTH = 0.95
"""The largest share of the memory's bandwidth that a kernel reaches."""
_LONG = (64, 4096)
"""Requests and context tokens at which attention comes closest to the memory's bandwidth."""
_USUAL = (32, 1024)
"""Requests and context tokens at which the backends are compared."""
_MOST_BUMP = 0.1
"""The largest share by which experts may take longer than for more tokens."""
_DECODE_TOKENS = range(8, 257, 8)
"""Tokens of steps that are decodes: the sizes for which vLLM captures CUDA graphs."""
_GEMM_TOKENS = 4096
_ATTENTION = "GenerationAttention"
_EXPERTS = "Moe"
_MATRICES = ("Gemm", _EXPERTS)

TYPICAL_STEPS: Mapping[str, tuple[Chunk, ...]] = {
    "64 decodes": ((1, 1023),) * 64,
    "prefill of 2048": ((2048, 0),),
    "both": ((1984, 0), *((1, 1023),) * 64),
}
"""Steps that show how far the backends are apart; the decodes are at 1,024 tokens."""


@dataclass(frozen=True)
class TableCheck:
    """What a backend's tables say of a model, and what speaks against them."""

    engine: str
    """Name and version of the engine."""
    decode_bandwidth: float | None
    """Share of the memory's bandwidth at which attention reads for 32 decodes at 1,024 tokens; None
    if the operator contains more than attention."""
    bytes_per_s: float | None
    gemm_throughput: float
    """Share of the GPU's peak that matrix products and experts reach in a prefill."""
    step_s: tuple[float, ...]
    """Times of the `TYPICAL_STEPS`."""
    doubts: tuple[str, ...]

    @property
    def said(self) -> str:
        """Return a sentence for the provenance."""
        reads = ""
        if self.decode_bandwidth is not None:
            reads = f"decode attention reads at {self.decode_bandwidth:.0%} of the bandwidth, "
        verdict = "; ".join(self.doubts) or "plausible by the rules"
        return f"{reads}matrix products at {self.gemm_throughput:.0%} of the peak: {verdict}"


def check_tables(deployment: Deployment, compiled: CompiledModel | None = None) -> TableCheck:
    """Check the tables of the deployment's backend.

    Raises MissingTablesError if it has none.
    """
    compiled = compiled or compile_model(deployment)
    try:
        tables = compiled.tables()
        bandwidth = _decode_bandwidth(compiled, tables, *_USUAL)
        fastest = _decode_bandwidth(compiled, tables, *_LONG)
        step_s = tuple(tables.step_s(chunks) for chunks in TYPICAL_STEPS.values())
        throughput = _gemm_throughput(compiled, tables)
        experts_s = _experts_s(compiled, tables)
    except (RuntimeError, ValueError) as error:
        raise no_tables(deployment, error) from error
    return TableCheck(
        engine=f"{BACKENDS[deployment.backend]} {compiled.version}",
        decode_bandwidth=bandwidth,
        bytes_per_s=None
        if bandwidth is None
        else bandwidth * peaks_of(deployment.system).bytes_per_s,
        gemm_throughput=throughput,
        step_s=step_s,
        doubts=(
            *_unmeasured_heads(deployment, compiled.decode),
            *_impossible(fastest),
            *_bump(experts_s),
        ),
    )


def compare_backends(deployment: Deployment) -> dict[str, TableCheck]:
    """Check the tables of every backend that has some; the deployment's own backend is ignored.

    Raises MissingTablesError, with the reason of the first backend, if none has tables.
    """
    checks: dict[str, TableCheck] = {}
    errors: list[MissingTablesError] = []
    for backend in BACKENDS:
        try:
            checks[backend] = check_tables(replace(deployment, backend=backend))
        except MissingTablesError as error:
            errors.append(error)
    if not checks:
        raise errors[0]
    return checks


def most_plausible(checks: Mapping[str, TableCheck]) -> str:
    """Return the first backend without a doubt, or the first one if there are doubts about all."""
    return next((name for name, check in checks.items() if not check.doubts), next(iter(checks)))


def _decode_bandwidth(
    compiled: CompiledModel, tables: OperatorTables, num_decodes: int, context_tokens: int
) -> float | None:
    """Return the share of the memory's bandwidth at which the decodes' attention reads."""
    if any(compiled.decode[i].kind != _ATTENTION for i in tables.decode_attention):
        return None
    least_s = sum(
        compiled.decode_limit_s(i, num_decodes, context_tokens) for i in tables.decode_attention
    )
    return least_s / tables.decode_attention_s(num_decodes, context_tokens)


def _gemm_throughput(compiled: CompiledModel, tables: OperatorTables) -> float:
    matrices = [i for i in tables.prefill_rest if compiled.prefill[i].kind in _MATRICES]
    least_s = sum(compiled.prefill_limit_s(i, _GEMM_TOKENS) for i in matrices)
    return least_s / tables.prefill_rest_s(_GEMM_TOKENS, matrices)


def _experts_s(compiled: CompiledModel, tables: OperatorTables) -> dict[int, float]:
    """Return the seconds that experts take, by the tokens of a step; nothing without experts."""
    experts = [i for i in tables.prefill_rest if compiled.prefill[i].kind == _EXPERTS]
    if not experts:
        return {}
    return {tokens: tables.prefill_rest_s(tokens, experts) for tokens in _DECODE_TOKENS}


def _unmeasured_heads(deployment: Deployment, decode: Sequence[Operator]) -> tuple[str, ...]:
    """Return a doubt if attention was not measured with the model's number of heads."""
    doubts = []
    for operator in decode:
        if operator.kind != _ATTENTION:
            continue
        heads, kv_heads = int(operator.settings["n"]), int(operator.settings["n_kv"])
        shared = 0 if heads == kv_heads else kv_heads
        key = (operator.settings["kv_cache_dtype"], shared, int(operator.settings["head_size"]))
        measured = measured_heads(deployment.system, deployment.backend).get(key, frozenset())
        if measured and min(measured) <= heads <= max(measured):
            continue
        known = ", ".join(map(str, sorted(measured))) or "other sizes of"
        kind = f"heads that share {shared} KV heads" if shared else "heads that share no keys"
        doubts.append(
            f"decode attention was measured with {known} {kind}, and the model has {heads} on each "
            "GPU: its time is extrapolated"
        )
    return tuple(dict.fromkeys(doubts))


def _impossible(bandwidth: float | None) -> tuple[str, ...]:
    if bandwidth is None or bandwidth <= _MOST_BANDWIDTH:
        return ()
    return (
        f"decode attention reads at {bandwidth:.0%} of the memory's bandwidth, and no kernel gets "
        f"beyond {_MOST_BANDWIDTH:.0%}",
    )


def _bump(experts_s: Mapping[int, float]) -> tuple[str, ...]:
    """Return a doubt if experts take much longer for some tokens than for more of them."""
    pairs = [(few, many) for few in experts_s for many in experts_s if few < many]
    if not pairs:
        return ()
    few, many = max(pairs, key=lambda pair: experts_s[pair[0]] / experts_s[pair[1]])
    if experts_s[few] <= (1 + _MOST_BUMP) * experts_s[many]:
        return ()
    return (
        f"experts take {1e3 * experts_s[few]:.1f} ms for {few} tokens and only "
        f"{1e3 * experts_s[many]:.1f} ms for {many}: the kernel is not tuned for the model",
    )
