"""Decodes that are served as one group, and what a policy can do to allow it.

Both base classes are optional.  A policy without them is asked about every request in every step:
its decisions are the same, its replays are slower, and so are its steps inside vLLM.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable, Mapping
from functools import cache
from itertools import takewhile
from typing import Protocol

from slosched.core.plan import Limits, Policy, SchedulerOutput, SchedulerView
from slosched.core.request import Request
from slosched.core.shape import BatchShape


class DecodeGroup(Protocol):
    """Running decodes, each of which gets one token in a step, as sums over all of them."""

    num_decodes: int
    context_tokens: int
    """Sum of their context lengths, including the token of this step."""
    max_context_tokens: int
    are_oldest: bool
    """Whether every other running request was admitted after the last of them."""

    @property
    def output_tokens(self) -> int:
        """Return the sum of the tokens that they have emitted."""

    @property
    def num_by_tpot_s(self) -> Mapping[float, int]:
        """Return the number of decodes for each TPOT of an SLO; no number is zero."""

    def num_by(self, key: Callable[[Request], Hashable]) -> Mapping[Hashable, int]:
        """Return the number of decodes for each value of `key`; no number is zero.

        The value for a request must not change.  Numbers are kept by function: a function that was
        not handed in before costs a count over the whole group.
        """

    @property
    def num_new_blocks(self) -> int:
        """Return the number of free KV blocks that their tokens of this step take."""

    @property
    def first_deadline_s(self) -> float:
        """Return the earliest deadline of their next tokens."""

    @property
    def last_deadline_s(self) -> float:
        """Return the latest deadline of their next tokens."""

    def first_deadline_from(self, tpot_s: float) -> float:
        """Return the earliest deadline of those with at least this TPOT; infinite without any."""


def group_shape(decodes: DecodeGroup) -> BatchShape:
    """Return the shape of a step that serves `decodes` and nothing else."""
    shape = BatchShape()
    shape.num_decodes = decodes.num_decodes
    shape.decode_context_tokens = decodes.context_tokens
    shape.max_decode_context_tokens = shape.max_context_tokens = decodes.max_context_tokens
    return shape


class PlansBesideDecodes(Policy):
    """A policy that can plan for all other requests while a group of decodes gets its tokens."""

    @abstractmethod
    def schedule_beside(self, decodes: DecodeGroup, view: SchedulerView) -> SchedulerOutput | None:
        """Return the plan for all others, or None to be shown each of the decodes.

        Each of `decodes` gets one token in the same step, and `view` shows all other requests.  The
        plan must be what `schedule` plans for these, and must neither preempt nor swap.  It is
        asked for, by the simulator and inside vLLM, only while no request is swapped out, no LoRA
        limit is set, and there are blocks for the tokens of the decodes.  After None `schedule` is
        called with all in view.
        """


class ForeseesDecodes(Policy):
    """A policy that can say for how long it serves a group of decodes and does nothing else."""

    @abstractmethod
    def decodes_until_s(self, decodes: DecodeGroup, limits: Limits) -> float:
        """Return the time before which every step gives each of `decodes` one token, no more.

        The simulator runs the steps that are predicted to end before that time without asking,
        until a request arrives or ends.  It asks only while there is no other request, and stops
        when blocks run out.  Return `-math.inf` to be asked in every step.
        """


def planner_beside(policy: Policy) -> PlansBesideDecodes | None:
    """Return `policy` if it can plan beside a group of decodes.

    A subclass that has replaced `schedule` alone cannot: `schedule_beside` plans as its base does.
    """
    if isinstance(policy, PlansBesideDecodes) and _goes_with_schedule(
        type(policy), "schedule_beside"
    ):
        return policy
    return None


def foreseer(policy: Policy) -> ForeseesDecodes | None:
    """Return `policy` if it can foresee steps of decodes, as with `planner_beside`."""
    if isinstance(policy, ForeseesDecodes) and _goes_with_schedule(type(policy), "decodes_until_s"):
        return policy
    return None


@cache
def _goes_with_schedule(policy: type[Policy], method: str) -> bool:
    """Tell whether no subclass of the class that wrote `method` has written another `schedule`."""
    return all(
        "schedule" not in vars(each)
        for each in takewhile(lambda each: method not in vars(each), policy.__mro__)
    )
