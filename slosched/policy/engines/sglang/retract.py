"""SGLang's estimate of what decodes will want, and which are retracted if it was too low."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from slosched.core import Request
from slosched.policy.engines.sglang.adder import num_known_outputs

INIT_NEW_TOKEN_RATIO = 0.7
MIN_NEW_TOKEN_RATIO_FACTOR = 0.14
NEW_TOKEN_RATIO_DECAY_STEPS = 600
RETRACT_DECODE_STEPS = 20
"""The defaults of SGLang's environment variables of these names."""


class NewTokenRatio:
    """The share of its `max_tokens` that a running request is expected to use.

    It falls with every decode step that finds room, and rises when requests were retracted.
    """

    def __init__(self, conservativeness: float) -> None:
        self._initial = min(INIT_NEW_TOKEN_RATIO * conservativeness, 1.0)
        self._least = min(self._initial * MIN_NEW_TOKEN_RATIO_FACTOR, 1.0)
        self._decay = (self._initial - self._least) / NEW_TOKEN_RATIO_DECAY_STEPS
        self.value = self._initial

    def reset(self) -> None:
        self.value = self._initial

    def decay(self) -> None:
        self.value = max(self.value - self._decay, self._least)

    def learn_from(self, kept: Sequence[Request]) -> None:
        """Set the ratio after a retraction: what the kept requests used, and a few steps more."""
        used = sum(map(num_known_outputs, kept)) + RETRACT_DECODE_STEPS * len(kept)
        self.value = min(1.0, used / (sum(r.max_tokens for r in kept) + 1))


def retract(
    running: Sequence[Request],
    has_room_for: Callable[[Sequence[Request]], bool],
    release: Callable[[Request], None],
) -> list[Request]:
    """Release at least one request, until there is room: fewest outputs, then longest prompts.

    Returns the kept requests in SGLang's order: the first to stay comes first.  The last one is
    never released.
    """
    kept = sorted(running, key=lambda r: (num_known_outputs(r), -r.num_prompt_tokens), reverse=True)
    num_before = len(kept)
    while len(kept) > 1 and (len(kept) == num_before or not has_room_for(kept)):
        release(kept.pop())
    return kept
