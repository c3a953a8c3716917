"""Draft tokens: guesses of a decode's next tokens, which its step verifies beside its own token."""

from __future__ import annotations

from typing import NamedTuple

from slosched.core.request import Request


class DraftOffer(NamedTuple):
    """A decode of a planned step that may verify draft tokens in the same step."""

    request: Request
    max_tokens: int
    """The most draft tokens that it may verify, at least one."""
    acceptance: float
    """The estimated share of draft tokens that are accepted, among those before which all were."""
