"""LoRA adapters with random weights, in peft's files, and models into which they are merged."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

LAYERS = ("self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.down_proj")
RANK, ALPHA = 4, 6.0


def write_adapter(path: Path, model: Any, seed: int, **settings: Any) -> Path:
    """Write an adapter for some layers of a llama, large enough to change its greedy tokens."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for i in range(len(model.model.layers)):
        for name in LAYERS:
            outputs, inputs = model.get_submodule(f"model.layers.{i}.{name}").weight.shape
            key = f"base_model.model.model.layers.{i}.{name}"
            weights[f"{key}.lora_A.weight"] = torch.randn(RANK, inputs, generator=generator) * 0.3
            weights[f"{key}.lora_B.weight"] = torch.randn(outputs, RANK, generator=generator) * 0.3
    path.mkdir()
    save_file(weights, path / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": ALPHA,
        "target_modules": [name.split(".")[1] for name in LAYERS],
        "bias": "none",
        "task_type": "CAUSAL_LM",
        **settings,
    }
    (path / "adapter_config.json").write_text(json.dumps(config))
    return path


def merged(model: Any, path: Path, scaling: float = ALPHA / RANK) -> Any:
    """Return a copy of the model with plain attention and the adapter's change in its weights."""
    from safetensors.torch import load_file

    twin = deepcopy(model)
    twin.set_attn_implementation("eager")
    weights = load_file(path / "adapter_model.safetensors")
    with torch.no_grad():
        for key, down in weights.items():
            if key.endswith("lora_A.weight"):
                name = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
                up = weights[key.replace("lora_A", "lora_B")]
                twin.get_submodule(name).weight += scaling * up @ down
    return twin
