"""Checks that a model must pass before it is served: its KV geometry, and correct logits.

A model that slosched's attention does not fit (a mask of its own, a state that is not a KV cache, a
layer without attention) often runs without an error and is silently wrong.  So the geometry is
taken from a run of the model instead of its config, and a short chunked run is compared with eager
attention.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from slosched.core import SloschedError
from slosched.engine.torch.attention import AttentionBackend, Scoring
from slosched.engine.torch.forward import ATTENTION_NAME, UnsupportedModelError, forward
from slosched.engine.torch.kv_cache import KVGeometry, PagedKVCache
from slosched.engine.torch.step_inputs import Spans, StepInputs

_KNOWN_LAYER_TYPES = {"full_attention", "sliding_attention"}
_SLIDING = "sliding_attention"


class Probed(NamedTuple):
    """What a run of one token tells about a model."""

    geometry: KVGeometry
    window_tokens: int | None
    """The last tokens that a token sees in any layer, itself included; None if it sees all."""


def probe(model: Any) -> Probed:
    """Return the KV geometry and the sliding window, read from what attention gets for one token.

    Raises UnsupportedModelError if the model does not run, if the layers differ, if some do not
    call slosched's attention, or if a layer that the config calls sliding passes no window.
    """
    run = _Probe()
    token = torch.zeros((1, 1), dtype=torch.long, device=model.device)
    try:
        with torch.inference_mode():
            model(input_ids=token, position_ids=token, use_cache=False, paged=run)
    except SloschedError:
        raise
    except Exception as error:  # a model that we do not know may do anything
        raise UnsupportedModelError(
            f"{type(model).__name__} does not run with slosched's attention "
            f"({type(error).__name__}: {error!s:.200}); serve another model"
        ) from error
    config = model.config.get_text_config()
    _check_layers(run, config)
    shapes = set(run.shapes.values())
    if len(shapes) != 1:
        raise UnsupportedModelError(
            f"the layers of {type(model).__name__} keep keys and values of different shapes, "
            f"{sorted(shapes)}; one paged cache holds one (KV heads, key dim, value dim)"
        )
    num_kv_heads, key_dim, value_dim = shapes.pop()
    if key_dim != value_dim:
        raise UnsupportedModelError(
            f"{type(model).__name__} has keys of {key_dim} and values of {value_dim} dimensions; "
            "one paged cache holds one head dimension"
        )
    geometry = KVGeometry(len(run.calls), num_kv_heads, key_dim, model.dtype)
    windows = [window for window in run.windows.values() if window is not None]
    sees_all = len(windows) < len(run.calls)
    return Probed(geometry, None if sees_all else max(windows))


def check_against_eager(
    model: Any, probed: Probed, backend: AttentionBackend, max_model_len: int
) -> None:
    """Run two sequences in chunks over shuffled blocks and compare all logits with eager attention.

    Raises UnsupportedModelError if they differ by more than rounding explains, or if eager
    attention's own are no numbers.
    """
    lengths = (min(32, max_model_len), min(11, max_model_len))
    generator = torch.Generator().manual_seed(0)
    vocab_size = model.config.get_text_config().vocab_size
    token_ids = [torch.randint(vocab_size, (n,), generator=generator) for n in lengths]
    token_ids = [ids.to(model.device) for ids in token_ids]
    paged = _run_in_chunks(model, probed, backend, token_ids)
    eager = _run_eagerly(model, token_ids)
    if not eager.isfinite().all():
        raise UnsupportedModelError(
            f"{type(model).__name__} computes logits in {model.dtype} that are no numbers, with "
            "eager attention, too: try another dtype, since many models exceed what float16 can "
            "hold; if all give this, the weights are broken"
        )
    distance = float((paged - eager).norm() / eager.norm())
    limit = 1e-3 if model.dtype == torch.float32 else 0.1
    if not distance <= limit:
        raise UnsupportedModelError(
            f"{type(model).__name__} over the paged cache differs from eager attention: relative "
            f"distance of the logits {distance:.2g}, limit {limit:g} in {model.dtype}. Its "
            "attention does more than ours computes, so its output would be wrong"
        )


class _Probe:
    """A stand-in for the paged cache with one token, whose attention is its own value."""

    def __init__(self) -> None:
        self.calls: list[int] = []
        self.shapes: dict[int, tuple[int, int, int]] = {}
        self.windows: dict[int, int | None] = {}

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring
    ) -> Tensor:
        self.calls.append(layer)
        self.shapes[layer] = (key.shape[1], key.shape[2], value.shape[2])
        self.windows[layer] = scoring.window
        return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)


def _check_layers(probe: _Probe, config: Any) -> None:
    num_layers = config.num_hidden_layers
    if probe.calls != list(range(num_layers)):
        raise UnsupportedModelError(
            f"the config says {num_layers} layers, but our attention was called for layers "
            f"{probe.calls}: the others have attention of their own, or a state that is no KV cache"
        )
    layer_types = getattr(config, "layer_types", None) or []
    if unknown := set(layer_types) - _KNOWN_LAYER_TYPES:
        raise UnsupportedModelError(f"layers of type {sorted(unknown)} are not implemented")
    for layer, layer_type in enumerate(layer_types):
        if layer_type == _SLIDING and probe.windows.get(layer) is None:
            raise UnsupportedModelError(
                f"layer {layer} is {layer_type!r} but hands no sliding_window to attention"
            )
    window = getattr(config, "sliding_window", None)
    is_sliding = not layer_types and window and window < config.max_position_embeddings
    if is_sliding and set(probe.windows.values()) == {None}:  # it is in a mask, as of PhiMoE
        raise UnsupportedModelError(
            f"the config says sliding_window={window}, but no layer hands one to attention"
        )


def _run_in_chunks(
    model: Any, probed: Probed, backend: AttentionBackend, token_ids: list[Tensor]
) -> Tensor:
    """Return the logits of all tokens in order, from passes that mix chunks and decodes."""
    # Small blocks, so that a sequence has several; kernels set a smallest size.
    block_size = max(4, backend.limits.block_multiple)
    num_blocks = sum(-(-len(ids) // block_size) for ids in token_ids)
    cache = PagedKVCache(
        probed.geometry, num_blocks=num_blocks, block_size=block_size, device=model.device
    )
    blocks = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0)).tolist()
    tables = []
    for ids in token_ids:
        needed = -(-len(ids) // block_size)
        tables.append(blocks[:needed])
        blocks = blocks[needed:]
    inputs = StepInputs(block_size, model.device, probed.window_tokens)
    logits: list[list[Tensor]] = [[] for _ in token_ids]
    # The chunks of the two sequences end at different points, so that some passes mix chunks and
    # decodes.
    for ends in ((0.4, 0.5), (0.97, 0.6), (1.0, 1.0)):
        spans, new_ids, owners = [], [], []
        for owner, (ids, end) in enumerate(zip(token_ids, ends, strict=True)):
            prior = sum(len(part) for part in logits[owner])
            new = int(len(ids) * end) - prior
            if new > 0:
                spans.append((new, prior, tables[owner]))
                new_ids.append(ids[prior : prior + new])
                owners.append(owner)
        flat_ids = torch.cat(new_ids).tolist()
        step_input = inputs.fill(owners, Spans.of(spans), flat_ids, range(len(flat_ids)))
        lengths = [len(ids) for ids in new_ids]
        parts = torch.split(forward(model, step_input, cache, backend), lengths)
        for owner, part in zip(owners, parts, strict=True):
            logits[owner].append(part)
    return torch.cat([part for parts in logits for part in parts]).float()


def _run_eagerly(model: Any, token_ids: list[Tensor]) -> Tensor:
    model.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            logits = [model(input_ids=ids[None], use_cache=False).logits[0] for ids in token_ids]
    finally:
        model.set_attn_implementation(ATTENTION_NAME)
    return torch.cat(logits).float()
