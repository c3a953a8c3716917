"""What an order of eviction is asked, and what it may know."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from slosched.core import LatencyModel, Request
from slosched.kv.eviction.lines import Line

_CHUNK_TOKENS = 2048
_FAR_TOKENS = 16_384
"""Prompt tokens before a chunk, at which the cost of attention is read off the latency model."""

KnownReturn = Callable[[Request], float]
"""Gives, of a request that has ended, the time in seconds at which its session's next turn comes;
inf if none does."""


class Rank(NamedTuple):
    """The place of a line in the order of eviction: the lowest goes first."""

    value: tuple[float, float]
    until_s: float = math.inf
    """Time from which on the rank has to be asked for again."""
    down_to: int = 0
    """The first block of the prompt for which it holds; those before it have another rank."""


def awaited(line: Line) -> Rank:
    """Return the rank of a line that requests wait for: above all others, the first in line last.

    Other ranks of an order that uses this one must begin with less than 2.
    """
    return Rank((2.0, -float(min(line.users.values()))))


class EvictionOrder:
    """Says which idle blocks of the prefix cache go first.

    It is told of arrivals and ends, and ranks whole lines: of a line, blocks go from its tail.  Its
    methods are called in the order of time, with the same times in the simulator and on a server.
    """

    def note_arrived(self, path: Sequence[Line], now_s: float) -> None:
        """Note the arrival of a request that begins with the lines of `path`.

        Those without users were idle since their `left_s`.  They get their new user after this.
        """

    def note_ended(self, request: Request, path: Sequence[Line], now_s: float) -> None:
        """Note the end of a request that began with the lines of `path`.

        Those without users are idle from now on.
        """

    def rank(self, line: Line, now_s: float) -> Rank:
        """Return the rank of a line that may be evicted now."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Known:
    """What the orders of eviction may know of the replica."""

    num_blocks: int
    """KV blocks on the device."""
    block_size: int
    latency_model: LatencyModel | None = None
    known_return: KnownReturn | None = None
    """The future, which only a simulator knows."""


class PrefillCost:
    """Device seconds that it takes to compute blocks of a prompt, by the latency model.

    A token costs the same everywhere, and attention to the tokens before it costs in proportion to
    their number.  Both are read off chunks of 2,048 tokens at the begin of a prompt and after
    16,384 tokens, so that a chunk's fixed cost is shared by its tokens.
    """

    def __init__(self, known: Known, order: str) -> None:
        """Read the costs; raise ValueError, which names the order, if there is no latency model."""
        model = known.latency_model
        if model is None:
            raise ValueError(
                f"the eviction order {order} weighs what it costs to compute a prefix again: give "
                "the prefix cache a latency model, or choose lru"
            )
        near_s = model.predict_prefill(_CHUNK_TOKENS) / _CHUNK_TOKENS
        far_s = model.predict_prefill(_CHUNK_TOKENS, _FAR_TOKENS) / _CHUNK_TOKENS
        size = known.block_size
        self._first_s = near_s * size
        self._more_s = max(0.0, far_s - near_s) / _FAR_TOKENS * size * size

    def per_block_s(self, start: int, stop: int) -> float:
        """Return the mean seconds for each of the blocks `start` to `stop` of a prompt."""
        return self._first_s + self._more_s * (start + stop) / 2
