"""L4: a bound from the peaks of a GPU's arithmetic and memory, without any other cost.

It holds for every engine on the device, not only for one latency model.  The gap between this
bound and that of a measured model is due to the engine.  The gap between the model's bound and a
policy is due to the policy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from slosched.core import BatchShape, Limits
from slosched.evaluate.bounds.demand import demand_at, shortest_step_s
from slosched.evaluate.bounds.on_time import Bound, fluid_bound
from slosched.evaluate.bounds.prices import StepPrices
from slosched.perfmodel.gpu_names import fact_of
from slosched.perfmodel.peaks import GPUS, Peaks
from slosched.perfmodel.transformers import BYTES_PER_NUMBER, Transformer, known_transformer
from slosched.workload.trace import Trace

_ASSUMPTIONS = (
    "bfloat16 weights and KV cache, each weight read once a step, peaks of the data sheet",
    "no speculative decoding, no prefix cache",
)
_SHARES = (1.0, 0.9, 0.75, 0.5)
"""The shares of arithmetic in the mixtures that are tried."""


@dataclass(frozen=True, slots=True)
class Roofline:
    """A model of physical limits: a step takes its arithmetic or its reading, whichever is longer.

    Each token is multiplied with every layer's weights, and each decode with the head's.  Every
    (query, key) pair takes 4 operations per query head and element.  The weights of the layers are
    read once a step, and the keys and values of every context are read or written once.
    """

    flops_per_token: float
    flops_per_decode: float
    flops_per_pair: float
    weight_bytes: float
    kv_bytes_per_token: float
    peaks: Peaks

    @classmethod
    def of(cls, model: Transformer, gpu: Peaks, num_gpus: int = 1) -> Roofline:
        """Return the roofline of `num_gpus` that share all work evenly, without communication."""
        return cls(
            flops_per_token=2.0 * model.layer_weights,
            flops_per_decode=2.0 * model.head_weights,
            flops_per_pair=4.0 * model.num_layers * model.num_query_heads * model.head,
            weight_bytes=float(BYTES_PER_NUMBER * model.layer_weights),
            kv_bytes_per_token=float(model.kv_bytes_per_token),
            peaks=Peaks(num_gpus * gpu.flops_per_s, num_gpus * gpu.bytes_per_s),
        )

    def predict(self, shape: BatchShape) -> float:
        """Return the seconds of one step; no engine takes less."""
        if not shape.num_tokens:
            return 0.0
        pairs = shape.prefill_attention_tokens + shape.decode_context_tokens
        flops = (
            self.flops_per_token * shape.num_tokens
            + self.flops_per_decode * shape.num_decodes
            + self.flops_per_pair * pairs
        )
        contexts = shape.prefill_context_tokens + shape.decode_context_tokens
        moved = self.weight_bytes + self.kv_bytes_per_token * contexts
        return max(flops / self.peaks.flops_per_s, moved / self.peaks.bytes_per_s)

    def prices(self, arithmetic: float, kv_tokens: int | None) -> StepPrices:
        """Return prices of a share `arithmetic` of the arithmetic, and the rest of memory's time.

        A step takes at least the longer of the two times, and so at least any mean of them.  The
        weights are charged to the contexts of decodes, of which a step holds at most `kv_tokens`.
        """
        flop_s, byte_s = (
            arithmetic / self.peaks.flops_per_s,
            ((1 - arithmetic) / self.peaks.bytes_per_s),
        )
        weights = self.weight_bytes / kv_tokens if kv_tokens else 0.0
        return StepPrices(
            per_prefill_token_s=self.flops_per_token * flop_s,
            per_decode_s=(self.flops_per_token + self.flops_per_decode) * flop_s,
            per_pair_s=self.flops_per_pair * flop_s,
            per_context_s=self.flops_per_pair * flop_s
            + (self.kv_bytes_per_token + weights) * byte_s,
        )


def roofline_bound(
    trace: Trace, roofline: Roofline, limits: Limits, kv_tokens: int | None = None
) -> Bound:
    """Return L4: the L1 bound at the roofline's times, which holds for every engine on this device.

    It is the least of several mixtures of arithmetic and memory, each of which is a bound.
    """
    shortest_s = shortest_step_s(roofline)
    found = [
        fluid_bound(
            demand_at(roofline.prices(share, kv_tokens), shortest_s, trace, limits, kv_tokens)
        )
        for share in _SHARES
    ]
    best = min(found, key=lambda bound: (bound.num_good, bound.sustained_per_s))
    return replace(best, name="L4 roofline", assumptions=_ASSUMPTIONS)


def roofline_of(provenance: Mapping[str, str]) -> Roofline | None:
    """Return the roofline of the GPU and model that a latency model was measured on.

    None if one of them is not known here, or if the weights were not bfloat16: other number formats
    have other peaks.
    """
    gpu = fact_of(provenance.get("gpu", ""), GPUS)
    model = known_transformer(provenance)
    if gpu is None or model is None:
        return None
    return Roofline.of(model, gpu, int(provenance.get("num_gpus", "1")))
