"""NewestTokens: what the last step drew, for the step that is launched before the host knows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from slosched.core import ScheduledChunk
from slosched.engine.torch.step_inputs import NOTHING_TAKEN, Taken


@dataclass(frozen=True)
class NewestTokens:
    """The tokens that a step drew, on the device, and whose they are."""

    rows: Mapping[str, int]
    """The entry of each request in `tokens`."""
    tokens: Tensor | None
    """Int64; None if the step drew none."""

    @classmethod
    def of(cls, chunks: Sequence[ScheduledChunk], tokens: Tensor) -> NewestTokens:
        """Return the tokens of a step in which each of these chunks drew one."""
        return cls({chunk.request.request_id: row for row, chunk in enumerate(chunks)}, tokens)

    def taken(self, places: Mapping[str, int]) -> Taken:
        """Return which tokens belong into the places of these requests in the next step.

        A request whose token is not here keeps what stands in its place: its step failed, so it has
        ended, and what is computed for it is not used.
        """
        known = [name for name in places if name in self.rows]
        if not known or self.tokens is None:
            return NOTHING_TAKEN
        rows = [self.rows[name] for name in known]
        return Taken([places[name] for name in known], rows, self.tokens)


NO_TOKENS = NewestTokens({}, None)
