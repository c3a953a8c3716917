"""The demands of vLLM V0 alone on the scheduler and the KV cache (`--prefix-cache merged`).

V0 accounts for KV blocks of equal content once, and a prompt that is cached as a whole still takes
a place in its step, where it computes its last token again.  No other policy needs to know this
file, and `slosched.core` does not export it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from slosched.core.plan import SchedulerOutput


@dataclass(frozen=True, slots=True)
class RepeatingOutput(SchedulerOutput):
    """A plan in which some requests compute a token again."""

    repeated: frozenset[str] = frozenset()
    """Scheduled requests whose single token is the last one that is computed already.  They take
    their place in the step and make no progress."""


def repeated_in(output: SchedulerOutput) -> frozenset[str]:
    """Return the requests that compute their last computed token again."""
    return output.repeated if isinstance(output, RepeatingOutput) else frozenset()


class BlockNames(ABC):
    """A ledger that can name the content of KV blocks: the one of a cache that merges equal blocks.

    Equal names mean equal content, of the block and of all tokens before it.
    """

    @abstractmethod
    def names(self, request_id: str, num_tokens: int) -> Sequence[Hashable]:
        """Return the names of the full blocks of a request's first `num_tokens` tokens.

        There are fewer if the content of some is not known yet.
        """

    @abstractmethod
    def num_holders(self, name: Hashable) -> int:
        """Return the number of requests that hold a block of this name, computed or planned."""
