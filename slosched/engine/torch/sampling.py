"""Sampling of the next token of each request, and the test whether the model ends there."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from slosched.core import GrammarError, GrammarState, Request, SamplingParams, ScheduledChunk
from slosched.engine.torch.draws import Logprobs, PendingDraws, coded
from slosched.engine.torch.masks import apply_masks
from slosched.engine.torch.penalties import Penalties
from slosched.engine.torch.random_tokens import drawn_tokens, random_number
from slosched.engine.torch.transfers import Fetched, uploaded

_GREEDY_TEMPERATURE = 1e-5
"""A temperature at or below which dividing overflows, and the draw would be the argmax anyway.
"""
_NEVER = float("-inf")
_NO_DRAFTS: Mapping[str, Sequence[int]] = {}


class _Row(NamedTuple):
    """A row of logits: those of the token after the last known one and some of its drafts."""

    request: Request
    drawing: _Drawing
    num_outputs: int
    """The number of output tokens before it, if these drafts are accepted."""
    drafts: Sequence[int]


class Sampler:
    """Samples greedily, or at random, for all rows of a batch at once.

    A request's draws depend only on its own seed and progress, never on the other requests in its
    batch.  Without a seed of its own, it gets one derived from `seed` and the request's id.

    A draft token is verified by drawing at its place as if there were no draft: it is accepted if
    it is what was drawn.  That is rejection sampling for a draft that is certain of its token: it
    is accepted with the probability p that the model gives it, and otherwise the token is drawn
    from the rest of p.  Each place of the output has one random number, so a seed gives the same
    tokens with drafts as without.  Source: Leviathan et al. (2023), arXiv 2211.17192.
    """

    def __init__(self, eos_token_ids: frozenset[int], device: torch.device, seed: int = 0) -> None:
        self._eos_token_ids = eos_token_ids
        self._device = device
        self._seed = seed
        self._drawing: dict[str, _Drawing] = {}

    def launch(
        self,
        chunks: Sequence[ScheduledChunk],
        logits: Tensor,
        drafts: Mapping[str, Sequence[int]] = _NO_DRAFTS,
    ) -> PendingDraws:
        """Draw one token for each chunk, after those of its `drafts` that are accepted.

        Nothing waits for the device, which may still compute the logits.  What was drawn is known
        when the result is waited for; before that, a request that `needs_tokens` must not draw
        again.

        `logits` [rows, vocabulary] has a row for each chunk, and after it one for each of its
        drafts.  Drafts from the first that breaks the request's grammar on are not looked at.  A
        request fails if its logits are not numbers, and is barred if what it asks for allows no
        token.  Overwrites the logits that a request's options change.
        """
        rows = self._rows(chunks, drafts)
        barred: dict[str, str] = {}
        masks, num_possible = _masks(rows, barred)
        num_likeliest = {
            index: num
            for index, row in enumerate(rows)
            if (num := row.request.sampling.num_logprobs) is not None
        }
        logprobs = Logprobs(logits, num_likeliest) if num_likeliest else None
        found = logits.amax(dim=-1).isfinite() if masks or any(map(_has_rules, rows)) else None
        if masks:
            apply_masks(logits, masks)
        for index, row in enumerate(rows):
            if _has_rules(row):
                row.drawing.change(logits[index], row)
        greatest, tokens = logits.max(dim=-1)
        are_numbers = greatest.isfinite() if found is None else found
        tokens = _with_random_ones(tokens, logits, rows)
        return PendingDraws(
            chunks=chunks,
            drafts=drafts,
            num_possible=num_possible,
            barred=barred,
            tokens=tokens,
            codes=Fetched(coded(tokens, are_numbers, greatest)),
            logprobs=None if logprobs is None else logprobs.fetch(tokens),
            is_last=self.is_last,
            told={
                row.request.request_id: row.drawing.accept
                for row in rows
                if needs_tokens(row.request)
            },
        )

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
        seed = None
        if sampling.temperature > _GREEDY_TEMPERATURE:
            seed = sampling.seed
            if seed is None:
                seed = zlib.crc32(request.request_id.encode(), self._seed)
        ends = self._ends(sampling) if sampling.min_tokens else ()
        allowed = sampling.allowed_token_ids
        return _Drawing(
            seed,
            ends=self._ids(ends),
            allowed=None if allowed is None else self._ids(allowed),
            bad_words=sampling.bad_words,
            penalties=Penalties.of(sampling, request.prompt_token_ids, self._device),
            grammar=None if sampling.grammar is None else sampling.grammar.begin(),
        )

    def _ids(self, ids: Sequence[int] | frozenset[int]) -> Tensor:
        return torch.tensor(list(ids), dtype=torch.long, device=self._device)


def needs_tokens(request: Request) -> bool:
    """Tell whether the next token of a request can only be drawn once the last one is known."""
    sampling = request.sampling
    return sampling.grammar is not None or bool(sampling.bad_words) or sampling.has_penalties


@dataclass(slots=True)
class _Drawing:
    """What a request's draws depend on besides its logits."""

    seed: int | None
    """What its random numbers are made from; None if it takes the likeliest token."""
    ends: Tensor
    """The tokens that it may not have before `min_tokens`."""
    allowed: Tensor | None
    """The only tokens that it may have; None if it may have all."""
    bad_words: Sequence[Sequence[int]]
    """Sequences of tokens of which it may never have the last one after the others."""
    penalties: Penalties | None
    """What it adds to logits and takes from them, if anything."""
    grammar: GrammarState | None = None
    """The place in its grammar that its output has reached."""
    outputs: list[int] = field(default_factory=list)
    """Its tokens so far, if they matter.  The request's own list may be a token behind."""

    def change(self, logits: Tensor, row: _Row) -> None:
        """Overwrite the logits as the request wishes, and of what it may not have in this place."""
        if self.penalties is not None:
            self.penalties.apply(logits, row.drafts)
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

    def accept(self, token: int) -> None:
        """Note a token that the request emits."""
        self.outputs.append(token)
        if self.penalties is not None:
            self.penalties.accept(token)
        if self.grammar is not None:
            self.grammar.accept(token)


def _has_rules(row: _Row) -> bool:
    """Tell whether `change` may change the row's logits."""
    drawing = row.drawing
    return (
        drawing.allowed is not None
        or bool(drawing.bad_words)
        or drawing.penalties is not None
        or row.num_outputs < row.request.sampling.min_tokens
    )


def _with_random_ones(tokens: Tensor, logits: Tensor, rows: Sequence[_Row]) -> Tensor:
    """Return the tokens, with one drawn at random in the rows of requests that want so."""
    drawn = [index for index, row in enumerate(rows) if row.drawing.seed is not None]
    if not drawn:
        return tokens
    samplings = [rows[index].request.sampling for index in drawn]
    numbers = [
        random_number(row.drawing.seed, row.num_outputs)
        for row in rows
        if row.drawing.seed is not None
    ]
    if len(drawn) == len(rows):
        return drawn_tokens(logits, samplings, numbers)
    places = uploaded(drawn, torch.int64, logits.device)
    found = drawn_tokens(logits.index_select(0, places), samplings, numbers)
    return tokens.index_copy(0, places, found)


def _masks(rows: Sequence[_Row], barred: dict[str, str]) -> tuple[dict[int, bytes], dict[str, int]]:
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
                barred[row.request.request_id] = str(error)
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
    logits.copy_(torch.where(without.max() > _NEVER, without, logits))
