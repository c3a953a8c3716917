"""A step in which not every request can have what it asks for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from slosched.core import Request, RequestStatus, SchedulerView
from slosched.policy.kit.pace import Pace
from slosched.policy.kit.punctual import Supply, Timed

_RUNNING = RequestStatus.RUNNING
"""A local name, because each attribute look-up on an enum takes 0.1 µs in Python 3.11."""


class Shortage(NamedTuple):
    """A step in which prompts lack time or KV blocks if every decode gets its token."""

    view: SchedulerView
    """The view of the policy, without the requests that it rejects in this step."""
    decodes: Sequence[Request]
    """All decodes, by deadline."""
    prompts: Sequence[Timed]
    """The prompts that wait or have begun, by deadline, with the time that they add to steps."""
    supply: Supply
    """Time and seats for the prompts while decodes run only as often as their TPOTs ask for."""
    pace: Pace
    """What the decodes ask of every step."""

    @property
    def lacks_seats(self) -> bool:
        """Tell whether more prompts want a seat than are free."""
        num_begun = sum([request.status is _RUNNING for request, _ in self.prompts])
        return len(self.prompts) - num_begun > self.supply.num_free_seats
