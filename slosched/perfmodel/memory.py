"""The memory of known GPUs, and how many tokens of KV cache an engine keeps in a share of it.

Engines count the share differently, so each way has a method.  All of them start from the capacity
in a latency model's provenance, which is that of vLLM at a share that the provenance says, too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from slosched.perfmodel.device import num_devices
from slosched.perfmodel.model import FittedModel
from slosched.perfmodel.transformers import known_transformer

MIB = 1 << 20

GPU_MEMORY_MIB: Mapping[str, int] = {
    "A30": 24576,
    "A100-SXM4-80GB": 81920,
    "H100 80GB HBM3": 81559,
    "NVIDIA H200": 143771,
    "NVIDIA B200": 183359,
    "L4": 23034,
    "L40S": 46068,
    "RTX 4090": 24564,
    "RTX PRO 6000 Blackwell": 97887,
}
"""The memory of each GPU by whole words of its name, as `nvidia-smi` prints it (memory.total)."""

KV_CAPACITY_SHARE = "kv_capacity_share"
"""The provenance's key for the share of the memory that weights, activations and the stated KV
capacity fill; capacities that were set by hand have none."""


def gpu_memory_mib(provenance: Mapping[str, str]) -> int | None:
    """Return the memory of one GPU of the measured device; None if it is not known here."""
    gpu = provenance.get("gpu", "")
    found = (m for name, m in GPU_MEMORY_MIB.items() if re.search(rf"\b{re.escape(name)}\b", gpu))
    return next(found, None)


@dataclass(frozen=True)
class KVMemory:
    """The memory of all GPUs together, and what stands in it besides the KV cache."""

    total_bytes: float
    weight_bytes: float
    other_bytes: float
    """Bytes of weights, activations and CUDA's own, which vLLM leaves out of the KV cache."""
    bytes_per_token: int

    def tokens_in_share(self, share: float) -> int:
        """Return the KV tokens if weights, activations and KV cache fill `share` of the memory."""
        return self._tokens(share * self.total_bytes - self.other_bytes)

    def tokens_beside_weights(self, share: float) -> int:
        """Return the KV tokens if weights and KV cache fill `share` of the memory."""
        return self._tokens(share * self.total_bytes - self.weight_bytes)

    def tokens_in_rest(self, share: float) -> int:
        """Return the KV tokens if they fill `share` of what weights and activations leave."""
        return self._tokens(share * (self.total_bytes - self.other_bytes))

    def _tokens(self, num_bytes: float) -> int:
        return max(0, int(num_bytes / self.bytes_per_token))


def kv_memory(model: FittedModel) -> KVMemory | None:
    """Return the memory of the device that a latency model was measured on.

    Returns None unless GPU and model are known here, and the provenance says for which share of the
    memory its KV capacity is.
    """
    facts = model.provenance
    memory_mib, transformer = gpu_memory_mib(facts), known_transformer(facts)
    capacity = facts.get("kv_capacity_tokens")
    share = facts.get(KV_CAPACITY_SHARE)
    if memory_mib is None or transformer is None or capacity is None or share is None:
        return None
    total_bytes = num_devices(model) * memory_mib * MIB
    kv_bytes = int(capacity) * transformer.kv_bytes_per_token
    return KVMemory(
        total_bytes=total_bytes,
        weight_bytes=transformer.weight_bytes,
        other_bytes=float(share) * total_bytes - kv_bytes,
        bytes_per_token=transformer.kv_bytes_per_token,
    )
