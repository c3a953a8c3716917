"""A forward pass of a transformers model over the paged KV cache.

transformers computes projections and rotary embeddings, then calls `paged_attention` for every
layer with the object that was given to `model(..., paged=step)`.  A `PagedStep` writes the new keys
and values into the cache and lets a backend attend over the block tables.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AttentionInterface

from slosched.core import SloschedError
from slosched.engine.torch.attention import AttentionBackend, PagedBatch, Scoring
from slosched.engine.torch.kv_cache import PagedKVCache
from slosched.engine.torch.step_inputs import StepInput

ATTENTION_NAME = "slosched"
"""The `attn_implementation` with which a model must be loaded."""


class UnsupportedModelError(SloschedError):
    """The model needs something that slosched's attention does not compute, so it is refused."""


@contextmanager
def refusing_other_attention() -> Iterator[None]:
    """Raise UnsupportedModelError for a model that has a table of its own attention classes.

    Its code looks the name of ours up there while the model is built.
    """
    try:
        yield
    except KeyError as error:
        if error.args != (ATTENTION_NAME,):
            raise
        raise UnsupportedModelError(
            "the model computes attention by classes of its own, which know no paged KV cache; "
            "serve another model"
        ) from error


class LayerAttention(Protocol):
    """The object that `model(..., paged=...)` takes."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring
    ) -> Tensor:
        """Return the attention of one layer; `key` and `value` are [tokens, KV heads, head dim]."""


class PagedStep:
    """The attention of one forward pass over the tokens of `batch`."""

    def __init__(self, batch: PagedBatch, cache: PagedKVCache, backend: AttentionBackend) -> None:
        self._slots = batch.slots
        self._cache = cache
        self._plan = backend.plan(batch)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring
    ) -> Tensor:
        k_cache, v_cache = self._cache.layer(layer)
        k_cache.flatten(0, 1).index_copy_(0, self._slots, key)
        v_cache.flatten(0, 1).index_copy_(0, self._slots, value)
        return self._plan.attend(query, k_cache, v_cache, scoring)


def forward(
    model: Any, step_input: StepInput, cache: PagedKVCache, backend: AttentionBackend
) -> Tensor:
    """Return the logits [emitting tokens, vocabulary] of one forward pass.

    Raises UnsupportedModelError if the model ignores `logits_to_keep`.
    """
    token_ids, emitting, batch = step_input
    with torch.inference_mode():
        logits: Tensor = model(
            input_ids=token_ids[None],
            position_ids=batch.positions[None],
            use_cache=False,
            paged=PagedStep(batch, cache, backend),
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
