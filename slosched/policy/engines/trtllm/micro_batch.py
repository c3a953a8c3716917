"""TensorRT-LLM's micro-batch scheduler: which requests run now, and how contexts are cut."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from slosched.policy.engines.trtllm.parts import ActiveRequest, Part, Room


class ContextChunking(StrEnum):
    """The ways in which contexts that do not fit whole share the tokens that generations leave."""

    NONE = "none"
    """Contexts are not cut."""
    FIRST_COME_FIRST_SERVED = "first_come_first_served"
    """Each context gets what is left, rounded down to a multiple of the unit."""
    EQUAL_PROGRESS = "equal_progress"
    """Each context in turn gets one unit more, until none can."""


@dataclass
class TokenBudget:
    """Fills the step in order; with chunking, contexts share the tokens that generations leave."""

    context_chunking_policy: ContextChunking = ContextChunking.NONE
    max_context_length: float = math.inf
    """The most tokens of one chunk."""

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
        """Return chunks of whole units; only the last chunk of a context may end within a unit."""
        wanted = [a.request.num_uncomputed_tokens for a in contexts]
        drafts = [a.num_draft_tokens for a in contexts]
        sizes = wanted
        if sum(wanted) + sum(drafts) > left or max(wanted, default=0) > self.max_context_length:
            sizes = chunk_sizes(
                self.context_chunking_policy, wanted, unit, left, self.max_context_length
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
    """Return the tokens of each context, at most `most` in total and `longest` each."""
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
            # A context that does not grow in one round never will, since the next round has less
            # left.
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
    """Return the draft tokens kept per context: those that fill a last chunk's last unit."""
    left = most - sum(sizes)
    kept = []
    for num_drafts, tokens, size in zip(drafts, wanted, sizes, strict=True):
        keep = 0.0
        if size == tokens:
            keep = max(0, min(num_drafts, -size % unit, longest - size, left))
        left -= keep
        kept.append(int(keep))
    return kept
