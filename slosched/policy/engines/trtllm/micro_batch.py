"""TensorRT-LLM's micro-batch scheduler: who runs in this step, and how contexts are cut."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from slosched.policy.engines.trtllm.parts import ActiveRequest, Part, Room


class ContextChunking(StrEnum):
    """How the tokens that generations leave are shared among contexts that do not fit whole."""

    NONE = "none"
    """Contexts are not cut."""
    FIRST_COME_FIRST_SERVED = "first_come_first_served"
    """Each gets what is left, down to a multiple of the unit."""
    EQUAL_PROGRESS = "equal_progress"
    """Each in turn gets one unit more, until none can."""


@dataclass
class TokenBudget:
    """In order, until the step is full; with chunking, contexts share what generations leave."""

    context_chunking_policy: ContextChunking = ContextChunking.NONE
    max_context_length: float = math.inf
    """Tokens of one chunk."""

    def schedule(self, fitting: Sequence[ActiveRequest], room: Room) -> Sequence[Part]:
        is_chunking = self.context_chunking_policy != ContextChunking.NONE
        left = room.max_num_tokens
        contexts: list[ActiveRequest] = []
        parts: list[Part] = []
        for active in fitting[: room.max_num_requests]:
            if is_chunking and not active.is_generation:
                contexts.append(active)
                continue
            num_tokens = 1 if active.is_generation else active.request.num_uncomputed_tokens
            num_drafts = active.num_draft_tokens
            if num_tokens + num_drafts > left:
                break
            left -= num_tokens + num_drafts
            parts.append(Part(active, num_tokens, num_drafts))
        return [*self._cut(contexts, left, room.block_size), *parts]

    def _cut(self, contexts: Sequence[ActiveRequest], left: int, unit: int) -> list[Part]:
        """Chunks of a whole number of units, but for a last one."""
        wanted = [a.request.num_uncomputed_tokens for a in contexts]
        drafts = [a.num_draft_tokens for a in contexts]
        sizes = wanted
        if sum(wanted) + sum(drafts) > left or max(wanted, default=0) > self.max_context_length:
            sizes = chunk_sizes(
                *(self.context_chunking_policy, wanted, unit, left, self.max_context_length)
            )
            drafts = drafts_kept(drafts, wanted, sizes, unit, left, self.max_context_length)
        chunks = map(Part, contexts, sizes, drafts)
        return [chunk for chunk in chunks if chunk.num_tokens > 0]


def chunk_sizes(
    policy: ContextChunking,
    wanted: Sequence[int],
    unit: int,
    most: float,
    longest: float = math.inf,
) -> list[int]:
    """Tokens for each context that wants so many, `most` together, none more than `longest`."""
    if policy == ContextChunking.EQUAL_PROGRESS:
        return _in_turns(wanted, unit, most, longest)
    sizes = []
    for tokens in wanted:
        size = min(tokens, most, longest)
        if size < tokens:
            size = size // unit * unit
        sizes.append(int(size))
        most -= size
    return sizes


def _in_turns(wanted: Sequence[int], unit: int, most: float, longest: float) -> list[int]:
    sizes = [0] * len(wanted)
    growing = list(range(len(wanted)))
    while growing:
        grown = []
        for i in growing:
            more = min(unit, wanted[i] - sizes[i])
            # What does not grow in one round never will: there is less left in the next.
            if 0 < more <= most and sizes[i] + more <= longest:
                sizes[i] += more
                most -= more
                grown.append(i)
        growing = grown
    return sizes


def drafts_kept(
    drafts: Sequence[int],
    wanted: Sequence[int],
    sizes: Sequence[int],
    unit: int,
    most: float,
    longest: float = math.inf,
) -> list[int]:
    """A last chunk keeps of its draft tokens what fills its last unit, the others none."""
    left = most - sum(sizes)
    kept = []
    for num_drafts, tokens, size in zip(drafts, wanted, sizes, strict=True):
        keep = 0.0
        if size == tokens:
            keep = max(0, min(num_drafts, -size % unit, longest - size, left))
        left -= keep
        kept.append(int(keep))
    return kept
