"""Draft tokens of simulated requests, which have no text: how many are accepted is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from zlib import crc32

from slosched.core import Request
from slosched.scheduler import Speculation


@dataclass(frozen=True)
class SimulatedDrafts:
    """Speculative decoding on a simulated device."""

    num_tokens: int
    """Most draft tokens that a decode verifies in a step."""
    acceptance: float
    """Probability that a draft token is accepted, if those before it were."""

    def __post_init__(self) -> None:
        if self.num_tokens < 1:
            raise ValueError(f"at least one token is to be drafted, not {self.num_tokens}")
        if not 0 <= self.acceptance <= 1:
            raise ValueError(f"acceptance must be in [0, 1], not {self.acceptance}")

    def speculation(self) -> Speculation:
        """Return what the scheduler of the device needs to speculate."""
        return Speculation(SimulatedProposer(), self.num_tokens)


@dataclass(frozen=True)
class AcceptedDrafts:
    """A draw, from the seed, of the draft tokens that a simulated device accepts."""

    acceptance: float
    seed: int = 0

    def num_first(self, request_id: str, num_outputs: int, num_drafts: int) -> int:
        """Return how many of the first of `num_drafts` drafts are accepted.

        They come after `num_outputs` output tokens.  The draw for a place in a request's output is
        the same whatever is scheduled.
        """
        for i in range(num_drafts):
            if self._draw(request_id, num_outputs + i) >= self.acceptance:
                return i
        return num_drafts

    def _draw(self, request_id: str, place: int) -> float:
        return crc32(f"{self.seed} {request_id} {place}".encode()) / (1 << 32)


class SimulatedProposer:
    """A source of as many draft tokens as are wanted; a simulated token has the id 0."""

    def propose(self, request: Request, max_tokens: int) -> Sequence[int]:  # noqa: ARG002
        return [0] * max_tokens

    def release(self, request_id: str) -> None:
        """Do nothing: it keeps nothing of a request."""
