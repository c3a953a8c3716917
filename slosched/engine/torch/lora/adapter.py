"""load_adapter: reads a LoRA adapter in peft's format for one model.

A directory holds `adapter_config.json` and `adapter_model.safetensors`.  For each layer that the
adapter changes there is A [rank, inputs] and B [outputs, rank], and the layer's output x W^T
becomes x W^T + scaling (x A^T) B^T (Hu et al., LoRA, ICLR 2022).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from slosched.core import AdapterError

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_KEY = re.compile(r"base_model\.model\.(?P<layer>.+)\.lora_(?P<part>[AB])\.weight")
_UNKNOWN: Mapping[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "use_dora": (False,),
    "fan_in_fan_out": (False,),
    "modules_to_save": (None, []),
    "trainable_token_indices": (None,),
    "alora_invocation_tokens": (None,),
    "layer_replication": (None,),
}
"""Settings of peft that change what is computed, each with the values that are implemented."""
_ON_OTHER_WEIGHTS = ("pissa", "corda", "olora", "loftq", "lora_ga")
"""Beginnings of `init_lora_weights` with which peft changes the model's own weights, too."""

Targets = Mapping[str, nn.Linear]
"""The layers of a model that an adapter may change, by name."""


class Factors(NamedTuple):
    """The change of one layer, for inputs and outputs in rows: x @ down @ up."""

    down: Tensor
    """[inputs, rank]"""
    up: Tensor
    """[rank, outputs], with the scaling in it."""


@dataclass(frozen=True, slots=True, eq=False)
class LoraAdapter:
    """An adapter in the device's memory, which is free when nothing refers to it any more."""

    factors: Mapping[str, Factors]
    """What is added to the output of each layer, by the layer's name."""

    @property
    def num_bytes(self) -> int:
        """Return the memory that the adapter takes."""
        return sum(f.down.nbytes + f.up.nbytes for f in self.factors.values())


def targets_of(model: nn.Module) -> Targets:
    """Return the linear layers of a transformers model that see every token of a step.

    That of the logits sees the last ones alone, and an expert those that are routed to it.
    """
    last = model.get_output_embeddings()  # type: ignore[operator]  # of every language model
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not last and ".experts." not in name
    }


def load_adapter(path: Path, targets: Targets) -> LoraAdapter:
    """Return the adapter in the directory `path`, on the device and in the type of its layers.

    Raises AdapterError if there is none, if it does not fit the model, or if it needs something
    that is not implemented.
    """
    config = _read_config(path / _CONFIG)
    for name, known in _UNKNOWN.items():
        if name in config and config[name] not in known:
            raise AdapterError(
                f"{path / _CONFIG} says {name}={config[name]!r:.100}, which is not implemented"
            )
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_ON_OTHER_WEIGHTS):
        raise AdapterError(
            f"{path / _CONFIG} says init_lora_weights={start!r:.100}: the adapter was trained on "
            "other weights than the model's; where peft can convert it, save it with "
            "save_pretrained(…, path_initial_model_for_weight_conversion=…)"
        )
    try:
        weights = load_file(path / _WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise AdapterError(f"{path / _WEIGHTS} cannot be read: {error}") from error
    found: dict[str, dict[str, Tensor]] = {}
    for key, weight in weights.items():
        match = _KEY.fullmatch(key)
        if match is None:
            raise AdapterError(f"{path / _WEIGHTS} has {key!r}, which is no LoRA weight of a layer")
        found.setdefault(match["layer"], {})[match["part"]] = weight
    if not found:
        raise AdapterError(f"{path / _WEIGHTS} changes no layer")
    return LoraAdapter(
        {name: _factors(name, parts, config, targets) for name, parts in found.items()}
    )


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise AdapterError(f"{path} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise AdapterError(f"{path} is not a JSON object")
    return config


def _factors(
    name: str, parts: Mapping[str, Tensor], config: Mapping[str, Any], targets: Targets
) -> Factors:
    """Return what an adapter adds to the layer `name`; raise AdapterError if it does not fit."""
    layer = targets.get(name)
    if layer is None:
        raise AdapterError(f"the adapter changes {name}, which is no layer that it may change")
    if parts.keys() != {"A", "B"}:
        raise AdapterError(f"the adapter has only lora_{'/'.join(parts)} of {name}")
    down, up = parts["A"], parts["B"]
    outputs, inputs = layer.weight.shape
    rank = len(down) if down.dim() else 0
    if not rank or down.shape != (rank, inputs) or up.shape != (outputs, rank):
        raise AdapterError(
            f"the adapter's weights of {name} are A {list(down.shape)} and B {list(up.shape)}; the "
            f"model needs [rank, {inputs}] and [{outputs}, rank]"
        )
    scaling = _scaling(name, rank, config)
    scaled = up.float() * scaling
    dtype, device = layer.weight.dtype, layer.weight.device
    factors = Factors(*(part.to(device, dtype).T.contiguous() for part in (down, scaled)))
    if not all(part.isfinite().all() for part in factors):
        raise AdapterError(
            f"the adapter's weights of {name}, B {scaling:g} times as large, are not all numbers "
            f"in {dtype}"
        )
    return factors


def _scaling(name: str, rank: int, config: Mapping[str, Any]) -> float:
    """Return alpha / rank, or alpha / sqrt(rank) for rank-stabilized LoRA.

    Raises AdapterError if the settings say no alpha.
    """
    alpha, patterns = config.get("lora_alpha", 8), config.get("alpha_pattern") or {}
    try:
        for pattern, value in patterns.items():
            if re.fullmatch(rf"(.*\.)?({pattern})", name):
                alpha = value
                break
        return float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)
    except (AttributeError, TypeError, ValueError, OverflowError, re.error) as error:
        raise AdapterError(
            f"lora_alpha={alpha!r:.100} and alpha_pattern={patterns!r:.100} say no alpha for "
            f"{name}: {error}"
        ) from error
