"""Attention of a transformers model over the paged KV cache, as one registered function.

transformers computes projections and rotary embeddings, then calls `paged_attention` for every
layer with the object that was given to `model(..., paged=step)`.  A `PagedStep` writes the new keys
and values into the cache and lets a backend attend over the block tables.  Only the backend depends
on a kernel; `slosched.engine.torch.sdpa` is the one that runs everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from transformers import AttentionInterface

from slosched.core import SloschedError
from slosched.engine.torch.kv_cache import PagedKVCache

ATTENTION_NAME = "slosched"
"""The `attn_implementation` with which a model must be loaded."""


class UnsupportedModelError(SloschedError):
    """The model needs something that slosched's attention does not compute, so it is refused."""


class TokenSpan(NamedTuple):
    """Tokens [prior, prior + new) of one sequence, and the blocks that hold [0, prior + new)."""

    num_new_tokens: int
    num_prior_tokens: int
    block_table: Sequence[int]

    @property
    def num_context_tokens(self) -> int:
        return self.num_prior_tokens + self.num_new_tokens


class Scoring(NamedTuple):
    """The parameters with which a layer turns queries and keys into weights."""

    scale: float
    window: int | None
    """Number of the last tokens that a token sees, itself included; None for all of them."""


class AttentionPlan(Protocol):
    """The work that a backend does once per forward pass and shares between the layers."""

    def attend(self, query: Tensor, k_cache: Tensor, v_cache: Tensor, scoring: Scoring) -> Tensor:
        """Return the causal attention of every span over its own context.

        `query` and the result are [tokens, query heads, head dim]. The caches are [blocks, block
        size, KV heads, head dim] and already hold the new tokens.
        """


class AttentionBackend(Protocol):
    """A kernel family that implements causal attention with an optional sliding window."""

    name: str

    def plan(self, spans: Sequence[TokenSpan], cache: PagedKVCache) -> AttentionPlan: ...


class LayerAttention(Protocol):
    """The object that `model(..., paged=...)` takes."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring
    ) -> Tensor:
        """Return the attention of one layer; `key` and `value` are [tokens, KV heads, head dim]."""


class PagedStep:
    """One forward pass over `spans`, whose tokens follow each other in this order."""

    def __init__(
        self, spans: Sequence[TokenSpan], cache: PagedKVCache, backend: AttentionBackend
    ) -> None:
        positions = [
            position
            for span in spans
            for position in range(span.num_prior_tokens, span.num_context_tokens)
        ]
        size = cache.block_size
        slots = [
            span.block_table[position // size] * size + position % size
            for span in spans
            for position in range(span.num_prior_tokens, span.num_context_tokens)
        ]
        self.position_ids = torch.tensor(positions, device=cache.device)
        """The position of each token in its own sequence: [tokens]."""
        self._slots = torch.tensor(slots, device=cache.device)
        self._cache = cache
        self._plan = backend.plan(spans, cache)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring
    ) -> Tensor:
        k_cache, v_cache = self._cache.layer(layer)
        k_cache.flatten(0, 1).index_copy_(0, self._slots, key)
        v_cache.flatten(0, 1).index_copy_(0, self._slots, value)
        return self._plan.attend(query, k_cache, v_cache, scoring)


def forward(model: Any, token_ids: Tensor, step: PagedStep, emitting: Tensor) -> Tensor:
    """Return the logits [emitting tokens, vocabulary] of one forward pass.

    `emitting` holds the indices of tokens whose logits are wanted.  Raises UnsupportedModelError if
    the model ignores `logits_to_keep`.
    """
    with torch.inference_mode():
        logits: Tensor = model(
            input_ids=token_ids[None],
            position_ids=step.position_ids[None],
            use_cache=False,
            paged=step,
            logits_to_keep=emitting,
        ).logits[0]
    if logits.shape[0] != emitting.shape[0]:
        raise UnsupportedModelError(
            f"{type(model).__name__} returned logits of {logits.shape[0]} tokens, "
            f"{emitting.shape[0]} were asked for: it ignores logits_to_keep"
        )
    return logits


_REFUSED = {
    "softcap": "soft-capped attention scores",
    "s_aux": "attention sinks",
    "position_bias": "a position bias",
}


def paged_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    paged: LayerAttention | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Return the attention of one layer, as transformers calls it.

    `query`, `key` and `value` are [1, heads, tokens, head dim]; the result is [1, tokens, heads,
    head dim]. Raises ValueError without `paged`, UnsupportedModelError if the model wants more than
    the backends implement.
    """
    if paged is None:
        raise ValueError(
            f"attention {ATTENTION_NAME!r} runs only with model(..., paged=step); for anything "
            "else call model.set_attn_implementation('sdpa') first"
        )
    _refuse_what_is_not_computed(module, attention_mask, kwargs)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    out = paged.attend(module.layer_idx, query, key, value, Scoring(scale, sliding_window))
    return out[None], None


def _refuse_what_is_not_computed(
    module: Any, attention_mask: Tensor | None, kwargs: dict[str, Any]
) -> None:
    name = type(module).__name__
    if attention_mask is not None:
        raise UnsupportedModelError(f"{name} passes a mask of its own, which would be ignored")
    for key, meaning in _REFUSED.items():
        if kwargs.get(key) is not None:
            raise UnsupportedModelError(
                f"{name} asks for {meaning} ({key}={kwargs[key]!r}), "
                "which no attention backend here implements"
            )


AttentionInterface.register(ATTENTION_NAME, paged_attention)
