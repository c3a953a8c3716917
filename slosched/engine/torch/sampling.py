"""Sampling of the next token of each request, and the test whether the model ends there."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from slosched.core import (
    GrammarError,
    GrammarState,
    Request,
    SamplingParams,
    ScheduledChunk,
    TokenLogprobs,
)
from slosched.engine.torch.masks import apply_masks

_GREEDY_TEMPERATURE = 1e-5
"""A temperature at or below which dividing overflows, and the draw would be the argmax anyway.
"""
_NEVER = float("-inf")


class Draws(NamedTuple):
    """What was drawn for each request, and why nothing could be drawn for the others."""

    token_ids: dict[str, int]
    failed: dict[str, str]
    """Requests whose logits are not numbers."""
    barred: dict[str, str]
    """Requests whose own rules leave no token."""
    logprobs: dict[str, TokenLogprobs]
    """Log-probabilities for those that want them."""


def no_draws() -> Draws:
    """Return the draws of a step in which no request gets a token."""
    return Draws({}, {}, {}, {})


class Sampler:
    """Samples greedily, or at random with one generator per request.

    A request's draws depend only on its own seed and progress, never on the other requests in its
    batch.  Without a seed of its own, it gets one derived from `seed` and the request's id.
    """

    def __init__(self, eos_token_ids: frozenset[int], device: torch.device, seed: int = 0) -> None:
        self._eos_token_ids = eos_token_ids
        self._device = device
        self._seed = seed
        self._drawing: dict[str, _Drawing] = {}

    def sample(self, chunks: Sequence[ScheduledChunk], logits: Tensor) -> Draws:
        """Draw one token for each chunk; row i of `logits` [chunks, vocabulary] is chunk i's.

        A request fails if its logits are not numbers, and is barred if what it asks for allows no
        token.  Overwrites the logits of tokens that a request may not have.
        """
        draws = no_draws()
        drawing = [self._drawing_of(chunk.request) for chunk in chunks]
        # The host finds the masks while a GPU still computes the logits.
        masks = _masks(chunks, drawing, draws)
        are_numbers: list[bool] = logits.amax(dim=-1).isfinite().tolist()
        plain = {
            row: logits[row].float().log_softmax(dim=-1)
            for row, chunk in enumerate(chunks)
            if chunk.request.sampling.num_logprobs is not None
        }
        if masks:
            apply_masks(logits, masks)
        for row, (chunk, one) in enumerate(zip(chunks, drawing, strict=True)):
            one.forbid(logits[row], chunk)
        likeliest = logits.max(dim=-1)
        tops: list[float] = likeliest.values.tolist()
        tokens: list[int] = likeliest.indices.tolist()
        for row, (chunk, one) in enumerate(zip(chunks, drawing, strict=True)):
            request = chunk.request
            if not are_numbers[row]:
                draws.failed[request.request_id] = "the model's logits are not numbers"
                continue
            if tops[row] == _NEVER:
                draws.barred.setdefault(
                    request.request_id,
                    "its grammar, allowed_token_ids, stop_token_ids and min_tokens leave no token",
                )
            if request.request_id in draws.barred:
                continue
            if one.generator is not None:
                weights = next_token_weights(logits[row], request.sampling)
                tokens[row] = int(torch.multinomial(weights, 1, generator=one.generator))
            one.note(tokens[row])
            draws.token_ids[request.request_id] = tokens[row]
            if row in plain:
                logprobs = _logprobs(plain[row], tokens[row], request.sampling.num_logprobs or 0)
                draws.logprobs[request.request_id] = logprobs
        return draws

    def is_last(self, request: Request, token_id: int) -> bool:
        """Tell whether `token_id` ends the request, apart from its output limit."""
        sampling = request.sampling
        if sampling.ignore_eos:
            return token_id in sampling.stop_token_ids
        return token_id in self._ends(sampling)

    def release(self, request_id: str) -> None:
        self._drawing.pop(request_id, None)

    def _ends(self, sampling: SamplingParams) -> frozenset[int]:
        return self._eos_token_ids.union(sampling.stop_token_ids)

    def _drawing_of(self, request: Request) -> _Drawing:
        found = self._drawing.get(request.request_id)
        if found is None:
            found = self._drawing[request.request_id] = self._new_drawing(request)
        return found

    def _new_drawing(self, request: Request) -> _Drawing:
        sampling = request.sampling
        generator = None
        if sampling.temperature > _GREEDY_TEMPERATURE:
            seed = sampling.seed
            if seed is None:
                seed = zlib.crc32(request.request_id.encode(), self._seed)
            generator = torch.Generator(self._device).manual_seed(seed)
        ends = self._ends(sampling) if sampling.min_tokens else ()
        allowed = sampling.allowed_token_ids
        return _Drawing(
            generator,
            ends=self._ids(ends),
            allowed=None if allowed is None else self._ids(allowed),
            bad_words=sampling.bad_words,
            grammar=None if sampling.grammar is None else sampling.grammar.begin(),
        )

    def _ids(self, ids: Sequence[int] | frozenset[int]) -> Tensor:
        return torch.tensor(list(ids), dtype=torch.long, device=self._device)


@dataclass(slots=True)
class _Drawing:
    """What a request's draws depend on besides its logits."""

    generator: torch.Generator | None
    """The source of its random numbers; None if it takes the likeliest token."""
    ends: Tensor
    """The tokens that it may not have before `min_tokens`."""
    allowed: Tensor | None
    """The only tokens that it may have; None if it may have all."""
    bad_words: Sequence[Sequence[int]]
    """Sequences of tokens of which it may never have the last one after the others."""
    grammar: GrammarState | None = None
    """The place in its grammar that its output has reached."""
    outputs: list[int] = field(default_factory=list)
    """Its tokens so far, if it has bad words.  The request's own list may be a token behind."""

    def forbid(self, logits: Tensor, chunk: ScheduledChunk) -> None:
        """Overwrite the logits of tokens that the request may not have next."""
        if self.allowed is not None:
            kept = logits[self.allowed]
            logits.fill_(_NEVER)
            logits[self.allowed] = kept
        if chunk.num_known_outputs < chunk.request.sampling.min_tokens:
            if self.grammar is None:
                logits[self.ends] = _NEVER
            else:
                _forbid_unless_all_are(logits, self.ends)
        if self.bad_words:
            _forbid_unless_all_are(logits, self._ends_of_bad_words())

    def _ends_of_bad_words(self) -> list[int]:
        """Return the tokens that would complete a bad word."""
        return [
            last
            for *before, last in self.bad_words
            if self.outputs[len(self.outputs) - len(before) :] == before
        ]

    def note(self, token_id: int) -> None:
        """Remember the token that was drawn."""
        if self.bad_words:
            self.outputs.append(token_id)
        if self.grammar is not None:
            self.grammar.accept(token_id)


def _masks(
    chunks: Sequence[ScheduledChunk], drawing: Sequence[_Drawing], draws: Draws
) -> dict[int, bytes]:
    """Return the masks of the rows that have one; bar the requests whose grammar gives none."""
    masks = {}
    for row, one in enumerate(drawing):
        if one.grammar is None:
            continue
        try:
            mask = one.grammar.mask()
        except GrammarError as error:
            draws.barred[chunks[row].request.request_id] = str(error)
            continue
        if mask is not None:
            masks[row] = mask
    return masks


def _forbid_unless_all_are(logits: Tensor, token_ids: Tensor | list[int]) -> None:
    """Forbid the tokens, unless no other token is left."""
    without = logits.clone()
    without[token_ids] = _NEVER
    if without.max() > _NEVER:
        logits.copy_(without)


def _logprobs(logprobs: Tensor, drawn: int, num_likeliest: int) -> TokenLogprobs:
    """Return those of the drawn token and of the likeliest ones, from all [vocabulary]."""
    likeliest = logprobs.topk(min(num_likeliest, logprobs.shape[-1]))
    pairs = zip(likeliest.indices.tolist(), likeliest.values.tolist(), strict=True)
    return TokenLogprobs(float(logprobs[drawn]), tuple(pairs))


def next_token_weights(logits: Tensor, sampling: SamplingParams) -> Tensor:
    """Return unnormalized odds [vocabulary] after temperature, min-p, top-k and top-p.

    That is vLLM's order.  Min-p drops what is less than `min_p` times as likely as the likeliest
    token.  Top-p keeps the smallest set of most likely tokens that holds at least `top_p`.  `min_p`
    0, `top_k` 0 and `top_p` 1 keep everything.  The greatest logit must be finite.
    """
    logits = logits.float()
    # The greatest becomes 0, so that nothing overflows; what is forbidden stays so at any
    # temperature, although -inf / inf is not a number.
    scaled = (logits - logits.max()) / sampling.temperature
    scaled = scaled.masked_fill(logits == _NEVER, _NEVER)
    if sampling.min_p > 0:
        scaled = scaled.masked_fill(scaled.exp() < sampling.min_p, _NEVER)
    if 0 < sampling.top_k < scaled.shape[-1]:
        least = scaled.topk(sampling.top_k).values[-1]
        scaled = scaled.masked_fill(scaled < least, _NEVER)
    probabilities = scaled.softmax(dim=-1)
    if sampling.top_p < 1:
        ordered, order = probabilities.sort(descending=True)
        before = ordered.cumsum(dim=-1) - ordered
        # The most likely token stays even with top_p 0.
        ordered = ordered.masked_fill((before >= sampling.top_p) & (before > 0), 0.0)
        probabilities = torch.zeros_like(probabilities).scatter_(0, order, ordered)
    return probabilities
