"""Chunks for a KV cache that is short: prompts fill it no faster than decodes empty it.

Time and memory ask for different steps.  While time is short, the longest chunks let most prompt
tokens through.  While KV blocks are short, such a chunk takes all of them at once.  Decodes alone
follow until some end, and each of these steps pays the constant of a step for no prompt token.
Shorter chunks beside all decodes compute the same tokens in less time, and every decode that gets
its token leaves its blocks sooner.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from slosched.core import KVView, LatencyModel, Request, SchedulerView
from slosched.policy.kit.chunks import Chunk, chunks_beside, largest_within
from slosched.policy.kit.pace import Pace, stay_tokens
from slosched.policy.kit.punctual import Supply, Timed, are_in_time

_FULL_STEPS = 8
"""Blocks are few if so many steps with the most tokens would take all that are free.  Prompts then
take this part of them in a step."""
_TURNOVER = 1.5
"""Prompt tokens of a step, as a multiple of those that decodes free in it when the cache is full.

Above 1, because the decodes that will end soon are not known."""
_FILLED = 0.5
"""Share of the cache from which on prompts that have time are spread over more steps."""
_CHEAP = 1.1
"""Factor on the least time for each token up to which a chunk is cheap."""
_RESERVE = 2.0
"""Factor by which prompts that are spread still have more time than they take."""


def num_blocks_needed(prompts: Sequence[Timed], block_size: int) -> int:
    """Return the KV blocks that the rest of all prompts takes.  O(n)."""
    # Negative counts are added up, because `//` rounds down.
    return -sum(
        [
            (request.num_computed_tokens - request.num_prompt_tokens - request.num_output_tokens)
            // block_size
            for request, _ in prompts
        ]
    )


def lacks_blocks(prompts: Sequence[Timed], num_free_blocks: int, view: SchedulerView) -> bool:
    """Tell whether there are not enough free KV blocks for all of the prompts.  O(n)."""
    return num_blocks_needed(prompts, view.kv.block_size) > num_free_blocks


def are_few(num_free_blocks: int, view: SchedulerView) -> bool:
    """Tell whether a few full steps of prompts would take all free blocks."""
    budget_tokens = view.limits.max_num_batched_tokens
    return num_free_blocks * view.kv.block_size < _FULL_STEPS * budget_tokens


def tokens_freed(stay_tokens: float, kv: KVView) -> float:
    """Return the tokens that decodes free in a step while they fill the cache and each emits one.

    A decode stays for `stay_tokens` steps, so a full cache is emptied once in so many.
    """
    return kv.num_blocks * kv.block_size / max(1.0, stay_tokens)


def has_time_for_freed(pace: Pace, limit_s: float, stay_tokens: float, view: SchedulerView) -> bool:
    """Tell whether a step as long as `limit_s` has time for as many prompt tokens as decodes free.

    If not, time is scarcer than blocks.
    """
    max_tokens = view.limits.max_num_batched_tokens - pace.shape.num_decodes
    if max_tokens <= 0:
        return True
    chunks = chunks_beside(view.model, pace.shape, pace.all_s, max_tokens)
    chunk = largest_within(chunks, pace.all_s, limit_s)
    freed = min(max_tokens, tokens_freed(stay_tokens, view.kv))
    return chunk is not None and chunk.num_tokens >= freed


def tokens_in_turn(
    pace: Pace, decodes: Sequence[Request], num_free_blocks: int, view: SchedulerView
) -> int | None:
    """Return the most prompt tokens of a step beside all decodes while blocks are short.

    They are about as many as decodes free in a step, never fewer than a cheap chunk has, and an
    eighth of what is free: what decodes free is estimated, and free blocks serve nobody.  Returns
    None if so many fit into no step anyway.
    """
    max_tokens = view.limits.max_num_batched_tokens
    cheap = next(_from_cheap(pace, view.model, max_tokens), None)
    if cheap is None:
        return None
    freed = _TURNOVER * tokens_freed(stay_tokens(decodes), view.kv)
    free = max(0, num_free_blocks) * view.kv.block_size / _FULL_STEPS
    tokens = int(max(freed, cheap.num_tokens) + free)
    return tokens if tokens < max_tokens - len(decodes) else None


def will_be_filled(num_blocks_needed: int, kv: KVView) -> bool:
    """Tell whether prompts that need so many blocks would leave less than half of them free."""
    return kv.num_free_blocks - num_blocks_needed <= (1 - _FILLED) * kv.num_blocks


def tokens_at_leisure(
    pace: Pace, prompts: Sequence[Timed], supply: Supply, now_s: float, view: SchedulerView
) -> int | None:
    """Return the most prompt tokens of a step while all prompts have time and the cache fills.

    It is the shortest chunk, from the longest of the cheap ones on, with which all prompts would
    still be in time if they took twice as long.  Returns None if there is none, or if the cache
    stays half empty.
    """
    kv, model, max_tokens = view.kv, view.model, view.limits.max_num_batched_tokens
    if not will_be_filled(num_blocks_needed(prompts, kv.block_size), kv):
        return None
    token_s = model.predict_prefill(max_tokens) / max_tokens
    for chunk in _from_cheap(pace, model, max_tokens):
        if chunk.step_s > pace.tpot_s:
            return None
        share = chunk.num_tokens * token_s / chunk.step_s / _RESERVE
        if are_in_time(prompts, supply._replace(start_s=now_s, share=share)):
            return int(chunk.num_tokens)
    return None


def _from_cheap(pace: Pace, model: LatencyModel, budget_tokens: int) -> Iterator[Chunk]:
    """Yield chunks beside all decodes, from the longest of the cheap ones on.

    A chunk is cheap if it adds hardly more time for each token than the best.  The longest that
    `budget_tokens` allow is left out: it would limit nothing.
    """
    max_tokens = budget_tokens - pace.shape.num_decodes
    if not pace.shape.num_decodes or max_tokens <= 0:
        return
    chunks = chunks_beside(model, pace.shape, pace.all_s, max_tokens)
    least_s = min(chunk.token_s for chunk in chunks)
    cheap = max(c.num_tokens for c in chunks if c.token_s <= _CHEAP * least_s)
    yield from (c for c in chunks[:-1] if c.num_tokens >= cheap)
