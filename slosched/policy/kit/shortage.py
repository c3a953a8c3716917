"""A step in which not every request can have what it asks for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from slosched.core import Request, SchedulerView
from slosched.policy.kit.punctual import Supply, Timed


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
