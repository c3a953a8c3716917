"""The share of draft tokens that are accepted, learnt of each request and of all together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

_FIRST_GUESS = 0.5
_GUESS_TOKENS = 4.0
"""Tokens for which the guess counts, next to those that were verified."""
_KEPT_BY_TOKEN = 0.95
"""Share of a request's older tokens that still counts after each new one: about 20 count."""
_KEPT_BY_TOKEN_OF_ALL = 0.998
_KEPT_BY_STEP = 0.99
"""Share that still counts after each step in which nothing was verified.

What is forgotten gives way to the guess, so that drafts are tried again after a while."""


@dataclass(slots=True)
class _Counts:
    """Verified and accepted draft tokens, of which the older ones count less."""

    num_verified: float = 0.0
    num_accepted: float = 0.0
    step: int = 0
    """The step in which tokens were last verified."""

    def add(self, num_verified: int, num_accepted: int, kept: float, step: int) -> None:
        kept = kept**num_verified * _KEPT_BY_STEP ** (step - self.step)
        self.num_verified = kept * self.num_verified + num_verified
        self.num_accepted = kept * self.num_accepted + num_accepted
        self.step = step

    def share(self, guess: float, step: int) -> float:
        """Return the share that is accepted, if `guess` stands for what is not known."""
        kept = _KEPT_BY_STEP ** (step - self.step)
        known = kept * self.num_verified + _GUESS_TOKENS
        return (kept * self.num_accepted + _GUESS_TOKENS * guess) / known


@dataclass(slots=True)
class Acceptance:
    """The estimated acceptance of draft tokens: a request's own, as far as it is known.

    It is the share of tokens that are accepted among those before which all were, so the first k
    drafts of an offer are all accepted with a probability of about its k-th power.  What a request
    lacks is taken from the share of all requests, and that begins at one half.
    """

    _all: _Counts = field(default_factory=_Counts)
    _of: dict[str, _Counts] = field(default_factory=dict)
    _step: int = 0

    def begin_step(self) -> None:
        """Let what is known count a little less."""
        self._step += 1

    def of(self, request_ids: Iterable[str]) -> list[float]:
        """Return the acceptance that is expected of each request's drafts."""
        step = self._step
        guess = self._all.share(_FIRST_GUESS, step)
        each = map(self._of.get, request_ids)
        return [guess if counts is None else counts.share(guess, step) for counts in each]

    def note(self, request_id: str, num_drafts: int, num_accepted: int) -> None:
        """Learn that the first `num_accepted` of a request's drafts were accepted.

        Of the others only the first was a trial.
        """
        num_verified = min(num_drafts, num_accepted + 1)
        counts = self._of.setdefault(request_id, _Counts(step=self._step))
        counts.add(num_verified, num_accepted, _KEPT_BY_TOKEN, self._step)
        self._all.add(num_verified, num_accepted, _KEPT_BY_TOKEN_OF_ALL, self._step)

    def forget(self, request_id: str) -> None:
        """Forget a request that has ended; it still counts among all."""
        self._of.pop(request_id, None)
