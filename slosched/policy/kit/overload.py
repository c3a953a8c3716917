"""Whether more prompts come than the device has time for, and all ask for about the same."""

from __future__ import annotations

from dataclasses import dataclass

from slosched.policy.kit.pausing import tokens_per_s_beside
from slosched.policy.kit.shortage import Shortage
from slosched.policy.kit.worth import Worth

_TOO_MANY = 1.25
"""Prompt tokens that arrive, as a multiple of those for which there is time, from which on the
overload is taken to last.  Above 1, because a burst passes."""
_MANY = 28
"""Prompts for which there is time within a TTFT, from which on they may go by length."""


@dataclass
class Overload:
    """Tells whether prompts should go by length instead of by deadline.

    While a burst passes, all prompts can be in time if those that are due first go first.  While
    more arrive than there is time for, some are late whatever is done, and time for a long prompt
    is time that shorter ones would have had that are still to come.  Where some have much more time
    than others, however, the order by length makes those late that are due soon.  And some that
    could be in time are late as shorter ones come before them: the fewer prompts there is time for
    within a TTFT, the more that is of them.
    """

    worth: Worth
    """It knows which requests arrived lately."""
    min_share: float
    """Least share of the device that prompts have."""

    def is_lasting(self, shortage: Shortage) -> bool:
        """Tell whether too many prompts arrive, nearly all with about the same SLO."""
        worth, now_s = self.worth, shortage.view.now_s
        served = tokens_per_s_beside(shortage.pace, shortage.view, self.min_share)
        arriving = worth.tokens_per_s(now_s)
        if arriving <= _TOO_MANY * served or not worth.are_promises_alike:
            return False
        return worth.ttft_s * worth.requests_per_s(now_s) * served / arriving >= _MANY
