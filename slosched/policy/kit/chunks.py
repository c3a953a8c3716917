"""Chunks of prompts beside decodes: how long their steps take, and what each token adds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from slosched.core import BatchShape, LatencyModel
from slosched.policy.kit.pace import Pace
from slosched.policy.kit.punctual import Timed

_LEAST_TOKENS = 64
"""Length of the shortest chunk that is asked for; each longer one has twice the tokens."""


class Chunk(NamedTuple):
    """A chunk of a prompt beside decodes."""

    num_tokens: float
    step_s: float
    """Predicted time of the step of the chunk and the decodes."""
    token_s: float
    """What a token adds to the step: (time with the chunk - time without it) / tokens; at least 0.
    """


def chunk_beside(model: LatencyModel, decodes: BatchShape, alone_s: float, tokens: int) -> Chunk:
    """Return a chunk beside `decodes`, whose step takes `alone_s` without it."""
    step = decodes.copy()
    step.add(tokens, 0)
    step_s = model.predict(step)
    return Chunk(tokens, step_s, max(0.0, step_s - alone_s) / tokens)


def chunks_beside(
    model: LatencyModel, decodes: BatchShape, alone_s: float, max_tokens: int
) -> list[Chunk]:
    """Return chunks of 64, 128, 256 … `max_tokens` tokens beside `decodes`."""
    lengths = []
    tokens = _LEAST_TOKENS
    while tokens < max_tokens:
        lengths.append(tokens)
        tokens *= 2
    lengths.append(max_tokens)
    return [chunk_beside(model, decodes, alone_s, n) for n in lengths]


def largest_within(chunks: Sequence[Chunk], alone_s: float, limit_s: float) -> Chunk | None:
    """Return about the largest chunk whose step takes `limit_s`; None if decodes leave no time.

    It is the last of `chunks` if that fits.  Otherwise its tokens are interpolated.
    """
    if chunks[-1].step_s <= limit_s:
        return chunks[-1]
    if alone_s >= limit_s:
        return None
    ladder = [Chunk(0, alone_s, 0.0), *chunks]
    at = next(i for i, chunk in enumerate(ladder) if chunk.step_s > limit_s)
    fits, beyond = ladder[at - 1], ladder[at]
    part = (limit_s - fits.step_s) / (beyond.step_s - fits.step_s)
    tokens = fits.num_tokens + part * (beyond.num_tokens - fits.num_tokens)
    return Chunk(tokens, limit_s, (limit_s - alone_s) / tokens)


def in_a_tpot(tpot_s: float, pace: Pace, model: LatencyModel, budget_tokens: int) -> Chunk | None:
    """Return about the largest chunk of a step as long as the TPOT; None if it has no time for one.

    The step holds the decodes that are due within it, and at most `budget_tokens` tokens.
    """
    due = pace.due_within(tpot_s)
    if due.num_decodes >= budget_tokens:
        return None
    due_s = model.predict(due)
    chunks = chunks_beside(model, due, due_s, budget_tokens - due.num_decodes)
    return largest_within(chunks, due_s, tpot_s)


def in_full_steps(
    tpot_s: float, pace: Pace, model: LatencyModel, budget_tokens: int, share: float
) -> Chunk | None:
    """Return the chunk of a step of `budget_tokens` tokens that is shorter than the TPOT.

    Returns None if the TPOT ends before such a step.  Otherwise several steps follow in each TPOT,
    and every one of them pays the constant of a step.  So `token_s` is not what a token adds to the
    step, but the whole step divided among the tokens of its chunk, as a part of the `share` of the
    time that decodes leave.  The step holds the decodes that are due within it.
    """
    full_s = model.predict(_full(pace.due_within(tpot_s), budget_tokens))
    if full_s >= tpot_s:
        return None
    step = pace.due_within(full_s)
    tokens = budget_tokens - step.num_decodes
    if tokens <= 0:
        return None
    step_s = model.predict(_full(step, budget_tokens))
    return Chunk(tokens, step_s, share * step_s / tokens)


def _full(decodes: BatchShape, budget_tokens: int) -> BatchShape:
    """Return a step of `decodes` and a chunk that takes what they leave of the tokens."""
    step = decodes.copy()
    if (tokens := budget_tokens - decodes.num_decodes) > 0:
        step.add(tokens, 0)
    return step


def in_chunks_like(
    chunk: Chunk, prompts: Iterable[Timed], model: LatencyModel, budget_tokens: int
) -> list[Timed]:
    """Return the prompts with the time that they add to steps of decodes, in chunks like `chunk`.

    Alone on the device, a short prompt takes time that several prompts in a step would share.  So
    a prompt shorter than `budget_tokens` counts by its tokens.  A longer one, whose attention takes
    more, counts by its time alone, as a multiple of that of `budget_tokens` tokens.
    """
    full_token_s = model.predict_prefill(budget_tokens) / budget_tokens
    factor = chunk.token_s / full_token_s
    timed = []
    for request, alone_s in prompts:  # hundreds, for which calls would take their time
        known = request.num_prompt_tokens + request.num_output_tokens
        tokens = known - request.num_computed_tokens
        if tokens < budget_tokens and tokens * full_token_s < alone_s:
            alone_s = tokens * full_token_s
        timed.append((request, factor * alone_s))
    return timed


def beside_decodes(
    prompts: Sequence[Timed], pace: Pace, model: LatencyModel, budget_tokens: int, share: float
) -> Sequence[Timed]:
    """Return the prompts with the time that they add to steps that last a TPOT.

    If steps have no tokens left before that, it is the time that they take of such steps, of which
    decodes leave the `share`.
    """
    if not pace.tiers:
        return prompts
    chunk = in_full_steps(pace.tpot_s, pace, model, budget_tokens, share)
    chunk = chunk or in_a_tpot(pace.tpot_s, pace, model, budget_tokens)
    return prompts if chunk is None else in_chunks_like(chunk, prompts, model, budget_tokens)
