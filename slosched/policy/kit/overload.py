"""Whether more prompts come than the device has time for, and all ask for about the same."""

from __future__ import annotations

from dataclasses import dataclass

from slosched.policy.kit.pausing import tokens_per_s_beside
from slosched.policy.kit.shortage import Shortage
from slosched.policy.kit.worth import Worth

_TOO_MANY = 1.25
"""Prompt tokens that arrive, as a multiple of those for which there is time, from which on the
overload is taken to last.  Above 1, because a burst passes."""
_MANY = 24
"""Requests that arrive within a TTFT, from which on there are enough to choose among."""


@dataclass
class Overload:
    """Tells whether prompts should go by length instead of by deadline.

    While a burst passes, all prompts can be in time if those that are due first go first.  While
    more arrive than there is time for, some are late whatever is done, and time for a long prompt
    is time that shorter ones would have had that are still to come.  Where some have much more time
    than others, however, the order by length makes those late that are due soon.  And where few
    arrive within a TTFT it made more of them late than it saved.
    """

    worth: Worth
    """It knows which requests arrived lately."""
    min_share: float
    """Least share of the device that prompts have."""

    def is_lasting(self, shortage: Shortage) -> bool:
        """Tell whether too many prompts arrive, and nearly all with about the same SLO."""
        view, worth = shortage.view, self.worth
        served = tokens_per_s_beside(shortage.pace, view, self.min_share)
        if worth.tokens_per_s(view.now_s) <= _TOO_MANY * served:
            return False
        return worth.are_promises_alike and worth.num_within_a_ttft(view.now_s) >= _MANY
