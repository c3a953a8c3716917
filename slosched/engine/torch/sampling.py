"""Sampling of the next token of each request, and the test whether the model ends there."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
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
_BARRED = "its grammar, allowed_token_ids, stop_token_ids and min_tokens leave no token"
_NO_DRAFTS: Mapping[str, Sequence[int]] = {}


class Draws(NamedTuple):
    """What was drawn for each request, and why nothing could be drawn for the others."""

    token_ids: dict[str, int]
    failed: dict[str, str]
    """Requests whose logits are not numbers."""
    barred: dict[str, str]
    """Requests whose own rules leave no token."""
    logprobs: dict[str, list[TokenLogprobs]]
    """Log-probabilities at the places of accepted drafts and of the drawn token, for those that
    want them."""
    num_accepted: dict[str, int]
    """How many of its first draft tokens each request emits before what was drawn for it."""


def no_draws() -> Draws:
    """Return the draws of a step in which no request gets a token."""
    return Draws({}, {}, {}, {}, {})


class _Row(NamedTuple):
    """A row of logits: those of the token after the last known one and some of its drafts."""

    request: Request
    drawing: _Drawing
    num_outputs: int
    """The number of output tokens before it, if these drafts are accepted."""
    drafts: Sequence[int]


class Sampler:
    """Samples greedily, or at random with one generator per request.

    A request's draws depend only on its own seed and progress, never on the other requests in its
    batch.  Without a seed of its own, it gets one derived from `seed` and the request's id.

    A draft token is verified by drawing at its place as if there were no draft: it is accepted if
    it is what was drawn.  That is rejection sampling for a draft that is certain of its token: it
    is accepted with the probability p that the model gives it, and otherwise the token is drawn
    from the rest of p.  One number is drawn for each token that is emitted, so a seed gives the
    same tokens with drafts as without.  Source: Leviathan et al. (2023), arXiv 2211.17192.
    """

    def __init__(self, eos_token_ids: frozenset[int], device: torch.device, seed: int = 0) -> None:
        self._eos_token_ids = eos_token_ids
        self._device = device
        self._seed = seed
        self._drawing: dict[str, _Drawing] = {}

    def sample(
        self,
        chunks: Sequence[ScheduledChunk],
        logits: Tensor,
        drafts: Mapping[str, Sequence[int]] = _NO_DRAFTS,
    ) -> Draws:
        """Draw one token for each chunk, after those of its `drafts` that are accepted.

        `logits` [rows, vocabulary] has a row for each chunk, and after it one for each of its
        drafts.  Drafts from the first that breaks the request's grammar on are not looked at.  A
        request fails if its logits are not numbers, and is barred if what it asks for allows no
        token.  Overwrites the logits of tokens that a request may not have.
        """
        draws = no_draws()
        rows = self._rows(chunks, drafts)
        # The host finds the masks while a GPU still computes the logits.
        masks, num_possible = _masks(rows, draws)
        are_numbers: list[bool] = logits.amax(dim=-1).isfinite().tolist()
        plain = {
            index: logits[index].float().log_softmax(dim=-1)
            for index, row in enumerate(rows)
            if row.request.sampling.num_logprobs is not None
        }
        if masks:
            apply_masks(logits, masks)
        for index, row in enumerate(rows):
            row.drawing.forbid(logits[index], row)
        likeliest = logits.max(dim=-1)
        tops: list[float] = likeliest.values.tolist()
        tokens: list[int] = likeliest.indices.tolist()
        first = 0
        for chunk in chunks:
            request_id, sampling = chunk.request.request_id, chunk.request.sampling
            offered = drafts.get(request_id, ())
            wanted = offered[: num_possible.get(request_id)]
            for at in range(first, first + len(wanted) + 1):
                if not are_numbers[at]:
                    draws.failed[request_id] = "the model's logits are not numbers"
                    break
                if tops[at] == _NEVER:
                    draws.barred.setdefault(request_id, _BARRED)
                if request_id in draws.barred:
                    break
                token = rows[at].drawing.draw(logits[at], tokens[at], sampling)
                if at in plain:
                    logprobs = _logprobs(plain[at], token, sampling.num_logprobs or 0)
                    draws.logprobs.setdefault(request_id, []).append(logprobs)
                num_accepted = at - first
                is_accepted = num_accepted < len(wanted) and token == wanted[num_accepted]
                if not is_accepted or self.is_last(chunk.request, token):
                    draws.token_ids[request_id] = token
                    if wanted:
                        draws.num_accepted[request_id] = num_accepted
                    break
            first += len(offered) + 1
        return draws

    def _rows(
        self, chunks: Sequence[ScheduledChunk], drafts: Mapping[str, Sequence[int]]
    ) -> list[_Row]:
        rows = []
        for chunk in chunks:
            request, drawing = chunk.request, self._drawing_of(chunk.request)
            wanted = drafts.get(request.request_id, ()) if drafts else ()
            num_known = chunk.num_known_outputs - len(wanted)
            rows.append(_Row(request, drawing, num_known, ()))
            for i in range(len(wanted)):
                rows.append(_Row(request, drawing, num_known + i + 1, wanted[: i + 1]))
        return rows

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

    def forbid(self, logits: Tensor, row: _Row) -> None:
        """Overwrite the logits of tokens that the request may not have in this place."""
        if self.allowed is not None:
            kept = logits[self.allowed]
            logits.fill_(_NEVER)
            logits[self.allowed] = kept
        if row.num_outputs < row.request.sampling.min_tokens:
            if self.grammar is None:
                logits[self.ends] = _NEVER
            else:
                _forbid_unless_all_are(logits, self.ends)
        if self.bad_words:
            _forbid_unless_all_are(logits, self._ends_of_bad_words([*self.outputs, *row.drafts]))

    def _ends_of_bad_words(self, outputs: Sequence[int]) -> list[int]:
        """Return the tokens that would complete a bad word after these outputs."""
        return [
            last
            for *before, last in self.bad_words
            if outputs[len(outputs) - len(before) :] == before
        ]

    def draw(self, logits: Tensor, likeliest: int, sampling: SamplingParams) -> int:
        """Return the next token, given its logits and the token with the greatest one."""
        token = likeliest
        if self.generator is not None:
            weights = next_token_weights(logits, sampling)
            token = int(torch.multinomial(weights, 1, generator=self.generator))
        if self.bad_words:
            self.outputs.append(token)
        if self.grammar is not None:
            self.grammar.accept(token)
        return token


def _masks(rows: Sequence[_Row], draws: Draws) -> tuple[dict[int, bytes], dict[str, int]]:
    """Return the masks of the rows that have one, and how many drafts requests can accept.

    The latter holds for requests with a grammar: no token is drawn after a draft that breaks it, or
    after one behind which its limits do not let it go on.  Bars the requests whose grammar gives no
    mask for their next token.
    """
    masks: dict[int, bytes] = {}
    num_possible: dict[str, int] = {}
    ahead: GrammarState | None = None
    for index, row in enumerate(rows):
        grammar = row.drawing.grammar
        if grammar is None:
            continue
        if not row.drafts:
            ahead = grammar
        elif ahead is not None and _allows(masks.get(index - 1), row.drafts[-1]):
            ahead = grammar.fork() if ahead is grammar else ahead
            ahead.accept(row.drafts[-1])
        else:
            ahead = None
        if ahead is None:
            continue
        try:
            mask = ahead.mask()
        except GrammarError as error:
            if not row.drafts:
                draws.barred[row.request.request_id] = str(error)
            ahead = None
            continue
        if mask is not None:
            masks[index] = mask
        num_possible[row.request.request_id] = len(row.drafts)
    return masks, num_possible


def _allows(mask: bytes | None, token_id: int) -> bool:
    """Tell whether a token may come next; without a mask any may."""
    if mask is None:
        return True
    place, bit = divmod(token_id, 8)
    return place < len(mask) and bool(mask[place] >> bit & 1)


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
