"""The reference for greedy output: the tokens that transformers itself generates."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from slosched.engine.torch import LoadedModel
from slosched.engine.torch.forward import ATTENTION_NAME


def generated(model: LoadedModel, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """Return the tokens of transformers' own greedy `generate`, which ignores ends of sequence."""
    device = model.model.device
    model.model.set_attn_implementation("sdpa")
    try:
        out = model.model.generate(
            torch.tensor([prompt], device=device),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long, device=device),
            max_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
        )
    finally:
        model.model.set_attn_implementation(ATTENTION_NAME)
    return out[0, len(prompt) :].tolist()
