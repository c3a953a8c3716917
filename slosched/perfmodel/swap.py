"""The time of copying a KV block between device and host, where it was not measured.

It is the block's bytes over the bandwidth of the GPU's host link in large copies from pinned
memory. Copies in small pieces, one layer of a block at a time, are slower, so the time is a lower
bound.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from slosched.core import SloschedError
from slosched.perfmodel.device import num_devices
from slosched.perfmodel.forms import with_swapped_block_s
from slosched.perfmodel.gpu_names import fact_of
from slosched.perfmodel.model import FittedModel
from slosched.perfmodel.transformers import known_transformer

SWAP_BLOCK_SIZE = 16
"""Tokens in a swapped block, unless the provenance has another number under `block_size`."""
KV_BYTES_PER_TOKEN = "kv_bytes_per_token_per_gpu"
"""The provenance's key for the bytes of the keys and values of one token on each GPU."""
SWAP_ORIGIN = "swap_origin"
"""The provenance's key for how the cost was derived; models with a measured cost lack it."""


class SwapCostError(SloschedError):
    """The cost of a swapped block cannot be derived."""


@dataclass(frozen=True, slots=True)
class HostLink:
    """The connection between a GPU and the host's memory."""

    name: str
    bytes_per_s: float
    """Bandwidth in one direction, in large copies from and to pinned memory."""
    source: str
    """The source of the measurement, and the bandwidth of the link in theory."""


_PCIE_4 = HostLink(
    "PCIe 4.0 x16",
    24.8e9,
    "effective: nvbandwidth 0.8 on A100-SXM4-80GB, forums.developer.nvidia.com thread 352186; "
    "31.5 GB/s in theory",
)
_PCIE_5 = HostLink(
    "PCIe 5.0 x16",
    55.6e9,
    "effective: host_to_device_memcpy_ce in NVIDIA's article on nvbandwidth; 63 GB/s in theory",
)
HOST_LINKS: Mapping[str, HostLink] = {
    "A100-SXM4-80GB": _PCIE_4,
    "A100 80GB PCIe": _PCIE_4,
    "A10": _PCIE_4,
    "A30": _PCIE_4,
    "H100 80GB HBM3": _PCIE_5,
    "H100 PCIe": _PCIE_5,
    "H200": _PCIE_5,
    "B200": _PCIE_5,
    "L40S": _PCIE_4,
    "L4": _PCIE_4,
    "RTX 3090": _PCIE_4,
    "RTX 4090": _PCIE_4,
    "RTX PRO 6000 Blackwell": _PCIE_5,
}
"""The link of each GPU, by a part of its name, from NVIDIA's data sheets.

GPUs on NVLink-C2C (GH200, GB200) and on PCIe 3.0 (T4) are missing, since their effective bandwidth
is not known here.
"""


def with_derived_swap(model: FittedModel) -> FittedModel:
    """Return the model with a swap cost derived from its GPU and model.

    The model is unchanged if it has a cost, or if its GPU or its model is not known.  The
    provenance says that the cost was derived, and from what.
    """
    link = fact_of(model.provenance.get("gpu", ""), HOST_LINKS)
    if link is None or model.swapped_block_s or _bytes_per_token(model) is None:
        return model
    return _with_bandwidth(model, link.bytes_per_s, f"over {link.name}", f" ({link.source})")


def with_swap_bandwidth(model: FittedModel, bytes_per_s: float) -> FittedModel:
    """Return the model with the swap cost of a link that carries `bytes_per_s` in one direction.

    Raises SwapCostError if the size of the model's KV cache is not known.
    """
    if not bytes_per_s > 0:
        raise ValueError(f"a swap bandwidth must be positive, not {bytes_per_s!r} bytes/s")
    return _with_bandwidth(model, bytes_per_s, "over a link", " as asked for")


def at_block_size(model: FittedModel, block_size: int) -> FittedModel:
    """Return the model with the swap cost of blocks of `block_size` tokens."""
    ratio = block_size / _block_size(model)
    if ratio == 1 or not model.swapped_block_s:
        return model
    noted = {**model.provenance, "block_size": str(block_size)}
    return with_swapped_block_s(model, ratio * model.swapped_block_s, noted)


def kv_bytes_per_token(model: FittedModel) -> float | None:
    """Return the bytes of one token's keys and values on all GPUs; None if they are not known."""
    per_gpu = _bytes_per_token(model)
    return None if per_gpu is None else per_gpu * num_devices(model)


def swap_cost(model: FittedModel) -> str:
    """Return a sentence on the cost of a swapped block and its origin."""
    block, origin = (
        f"a swapped block of {_block_size(model)} tokens",
        model.provenance.get(SWAP_ORIGIN),
    )
    if not model.swapped_block_s:
        return f"{block} costs nothing: {'as asked for' if origin else 'none was measured'}"
    return f"{block} costs {1e6 * model.swapped_block_s:.4g} µs, {origin or 'measured'}"


def _with_bandwidth(model: FittedModel, bytes_per_s: float, link: str, source: str) -> FittedModel:
    token_bytes = _bytes_per_token(model)
    if token_bytes is None:
        raise SwapCostError(
            f"the sizes of {model.provenance.get('model', 'this model')!r} are not known, so a "
            "bandwidth does not say what its KV blocks cost: measure copies with `slosched profile`"
        )
    per_block_s = _block_size(model) * token_bytes / bytes_per_s
    gpus = "" if num_devices(model) == 1 else f" of each of {num_devices(model)} GPUs"
    rate = "free" if math.isinf(bytes_per_s) else f"{bytes_per_s / 1e9:.4g} GB/s"
    origin = (
        f"derived, not measured: {token_bytes:.0f} bytes a token {link}{gpus} at {rate}{source}"
    )
    return with_swapped_block_s(model, per_block_s, {**model.provenance, SWAP_ORIGIN: origin})


def _bytes_per_token(model: FittedModel) -> float | None:
    """Return the bytes of one token's keys and values on each GPU; None if they are not known."""
    said = model.provenance.get(KV_BYTES_PER_TOKEN)
    if said is not None:
        return float(said)
    transformer = known_transformer(model.provenance)
    return None if transformer is None else transformer.kv_bytes_per_token / num_devices(model)


def _block_size(model: FittedModel) -> int:
    return int(model.provenance.get("block_size", SWAP_BLOCK_SIZE))
