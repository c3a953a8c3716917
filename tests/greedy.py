"""The reference for greedy output: the tokens that transformers itself generates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from slosched.engine.torch import LoadedModel
from slosched.engine.torch.forward import ATTENTION_NAME

Allowed = Callable[[list[int]], Sequence[int]]
"""Returns the tokens that may follow an output."""


def generated(
    model: LoadedModel, prompt: Sequence[int], num_tokens: int, allowed: Allowed | None = None
) -> list[int]:
    """Return the tokens of transformers' own `generate` with its own attention."""
    model.model.set_attn_implementation("sdpa")
    try:
        return continued(model.model, prompt, num_tokens, allowed)
    finally:
        model.model.set_attn_implementation(ATTENTION_NAME)


def continued(
    model: Any, prompt: Sequence[int], num_tokens: int, allowed: Allowed | None = None
) -> list[int]:
    """Return the greedy tokens of a transformers model, which ignores ends of sequence."""

    def next_ones(_: int, ids: torch.Tensor) -> Sequence[int]:
        assert allowed is not None
        return allowed(ids[len(prompt) :].tolist())

    with torch.inference_mode():
        out = model.generate(
            torch.tensor([prompt], device=model.device),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long, device=model.device),
            max_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
            prefix_allowed_tokens_fn=None if allowed is None else next_ones,
        )
    found: list[int] = out[0, len(prompt) :].tolist()
    return found
