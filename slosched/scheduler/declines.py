"""How often a policy is asked to plan beside a group of decodes, where it has declined to."""

from __future__ import annotations

_MOST_SKIPPED = 32
"""Most steps without a question after the policy has declined repeatedly."""


class Declines:
    """Counts the steps in which a policy is not asked: 1, 3, 7, … after each time it declines."""

    def __init__(self) -> None:
        self._num_to_skip = 0
        self._num_skipped = 0

    def skips_step(self) -> bool:
        """Tell whether the policy is not asked about this step, which is then counted."""
        if not self._num_to_skip:
            return False
        self._num_to_skip -= 1
        return True

    def note_declined(self) -> None:
        """Do not ask for about twice as many steps as after the last time."""
        self._num_skipped = min(_MOST_SKIPPED, 2 * self._num_skipped + 1)
        self._num_to_skip = self._num_skipped

    def note_planned(self) -> None:
        """Ask soon after the next time that the policy declines."""
        self._num_skipped = 0

    def skip_one(self) -> None:
        """Do not ask about the next step."""
        self._num_to_skip = 1
