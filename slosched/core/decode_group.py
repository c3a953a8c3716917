"""Decodes that the simulator serves as one group, and the policies that allow it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Protocol

from slosched.core.request import Request


class DecodeGroup(Protocol):
    """Running decodes, of which each gets one token in a step, as sums over all of them."""

    num_decodes: int
    context_tokens: int
    """Sum of their context lengths, the token of this step included."""
    max_context_tokens: int
    are_oldest: bool
    """True if every other running request was admitted after the last of them."""

    @property
    def num_by_tpot_s(self) -> Mapping[float, int]:
        """How many of them were promised each TPOT; none with a count of zero."""

    def num_by(self, key: Callable[[Request], Hashable]) -> Mapping[Hashable, int]:
        """How many of them have each value of `key`, which is to be constant; none with zero.

        Counted anew for each function, so hand in the same one in every step.
        """

    @property
    def num_new_blocks(self) -> int:
        """KV blocks that their tokens of this step take from the free ones."""

    @property
    def first_deadline_s(self) -> float:
        """When the most urgent of them has to have its next token."""
