"""Tokens drawn at random, for all rows of a batch at once and without waiting for the device."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import torch
from torch import Tensor

from slosched.core import SamplingParams
from slosched.engine.torch.transfers import uploaded

_NEVER = float("-inf")


def random_number(seed: int, index: int) -> float:
    """Return the number in [0, 1) with which a request of this seed draws output token `index`.

    It depends on nothing else, neither on the batch nor on what was drawn before.
    """
    digest = blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
    return float((int.from_bytes(digest) >> 11) * 2.0**-53)


def drawn_tokens(
    logits: Tensor, samplings: Sequence[SamplingParams], numbers: Sequence[float]
) -> Tensor:
    """Return a token for each row of `logits` [rows, vocabulary]: int64 [rows].

    It is the first one at which the sum of the row's odds exceeds the share `numbers[row]` of their
    total.  So one number makes a draw, and no row changes what another one draws.  A row without
    numbers gets any token.
    """
    # In float32 the sum of a large vocabulary would lose the least likely tokens.
    sums = next_token_weights(logits, samplings).cumsum(dim=-1, dtype=torch.float64)
    shares = uploaded(numbers, torch.float64, logits.device)[:, None]
    places = torch.searchsorted(sums, shares * sums[:, -1:], right=True)[:, 0]
    return places.clamp_(max=logits.shape[-1] - 1)


def next_token_weights(logits: Tensor, samplings: Sequence[SamplingParams]) -> Tensor:
    """Return unnormalized odds [rows, vocabulary] after temperature, min-p, top-k and top-p.

    That is vLLM's order.  Min-p drops what is less than `min_p` times as likely as the likeliest
    token.  Top-p keeps the smallest set of most likely tokens that holds at least `top_p`.  `min_p`
    0, `top_k` 0 and `top_p` 1 keep everything.  The greatest logit of a row must be finite.
    """
    logits = logits.float()
    # The greatest becomes 0, so that nothing overflows; what is forbidden stays so at any
    # temperature, although -inf / inf is not a number.
    scaled = logits - logits.amax(dim=-1, keepdim=True)
    scaled /= _column([sampling.temperature for sampling in samplings], logits)
    scaled.masked_fill_(logits == _NEVER, _NEVER)
    if any(sampling.min_p > 0 for sampling in samplings):
        least = _column([sampling.min_p for sampling in samplings], logits)
        scaled.masked_fill_(scaled.exp() < least, _NEVER)
    _keep_top_k(scaled, [sampling.top_k for sampling in samplings])
    probabilities = scaled.softmax(dim=-1)
    _keep_top_p(probabilities, [sampling.top_p for sampling in samplings])
    return probabilities


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return uploaded(values, torch.float32, like.device)[:, None]


def _keep_top_k(scaled: Tensor, top_k: Sequence[int]) -> None:
    """Forbid what is below the k-th greatest of its row; 0 forbids nothing, as a k too large."""
    vocab_size = scaled.shape[-1]
    limited = [row for row, k in enumerate(top_k) if 0 < k < vocab_size]
    if not limited:
        return
    last = [top_k[row] - 1 for row in limited]
    greatest = scaled.topk(max(last) + 1).values
    rows, places = (uploaded(values, torch.int64, scaled.device) for values in (limited, last))
    least = torch.full_like(scaled[:, :1], _NEVER)
    least.index_put_((rows,), greatest[rows, places][:, None])
    scaled.masked_fill_(scaled < least, _NEVER)


def _keep_top_p(probabilities: Tensor, top_p: Sequence[float]) -> None:
    """Set the least likely tokens of each row to 0 as far as the others reach `top_p` together."""
    limited = [row for row, p in enumerate(top_p) if p < 1]
    if not limited:
        return
    rows = uploaded(limited, torch.int64, probabilities.device)
    ordered, order = probabilities.index_select(0, rows).sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(dim=-1) - ordered
    # The most likely token stays even with top_p 0.
    is_enough = before >= _column([top_p[row] for row in limited], probabilities)
    ordered.masked_fill_(is_enough & (before > 0), 0.0)
    probabilities.index_copy_(0, rows, torch.empty_like(ordered).scatter_(1, order, ordered))
