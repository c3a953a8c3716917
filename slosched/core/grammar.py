"""Rules for the text of an output, which leave only some tokens for the next place."""

from __future__ import annotations

from typing import Protocol

from slosched.core.errors import SloschedError


class GrammarError(SloschedError):
    """A grammar is wrong, or takes too long to compile or to follow; the text says which."""


class GrammarState(Protocol):
    """The place in a grammar that one output has reached."""

    def mask(self) -> bytes | None:
        """Return the tokens that may come next; None after the end, where nothing is ruled out.

        Token i has the bit i % 8 of byte i // 8, counted from the lowest bit, and tokens beyond
        the last byte may not come.  Raises GrammarError if the tokens cannot be found in bounded
        time.
        """

    def accept(self, token_id: int) -> None:
        """Go on by a token of the output that the last mask allowed."""

    def fork(self) -> GrammarState:
        """Return this place for another output, which goes on without changing this one."""


class OutputGrammar(Protocol):
    """A grammar that was compiled for a vocabulary.  Any number of outputs may follow it."""

    def begin(self) -> GrammarState:
        """Return the place of an output that has no tokens yet."""
