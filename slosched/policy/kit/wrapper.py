"""Wrappers: policies that hold back or reject requests in front of another policy."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from slosched.core import (
    DecodeGroup,
    DraftOffer,
    EndReason,
    ForeseesDecodes,
    Limits,
    PlansBesideDecodes,
    Policy,
    PromptOrder,
    Request,
    SchedulerOutput,
    SchedulerView,
    foreseer,
    planner_beside,
)


class Gate(NamedTuple):
    """The decision on waiting requests: some are let through, some rejected, the rest held back."""

    through: Sequence[Request]
    """Waiting requests that the inner policy is shown, in the order in which they wait."""
    rejected: Mapping[str, EndReason]
    """Ids of the requests that are rejected in this step, with the reasons."""


@dataclass
class Wrapper(PlansBesideDecodes, ForeseesDecodes):
    """A policy in front of another one, the inner policy.

    The inner policy sees a view without the waiting requests that are held back or rejected.  On
    the command line a wrapper follows what it wraps: `edf+early_rejection+past_future`.

    A subclass writes `gate`, and `gate_beside` for fast replays.  Both may be called more than once
    before a step is planned, so what they learn must not depend on the number of calls; `planned`
    is the place to remember a decision.  While no request runs or is swapped out, at least one
    has to be let through or rejected.
    """

    inner: Policy

    @abstractmethod
    def gate(self, view: SchedulerView) -> Gate:
        """Decide about the waiting requests."""

    def gate_beside(self, decodes: DecodeGroup, view: SchedulerView) -> Gate | None:
        """Decide as `gate` does, given the decodes as a group; return None to be shown each one."""
        return None

    def planned(self, view: SchedulerView, gate: Gate, output: SchedulerOutput) -> None:
        """Learn that `output` will be executed, which came of `gate` and the inner policy."""

    def schedule(self, view: SchedulerView) -> SchedulerOutput:
        gate = self.gate(view)
        return self._joined(view, gate, self.inner.schedule(_shown(view, gate)))

    def schedule_beside(self, decodes: DecodeGroup, view: SchedulerView) -> SchedulerOutput | None:
        """Plan beside the decodes if both this wrapper and the inner policy can."""
        inner = planner_beside(self.inner)
        if inner is None:
            return None
        gate = self.gate_beside(decodes, view)
        if gate is None:
            return None
        output = inner.schedule_beside(decodes, _shown(view, gate))
        return None if output is None else self._joined(view, gate, output)

    def decodes_until_s(self, decodes: DecodeGroup, limits: Limits) -> float:
        """Return the time of the inner policy: no request waits, so there is nothing to gate."""
        inner = foreseer(self.inner)
        return -math.inf if inner is None else inner.decodes_until_s(decodes, limits)

    @property
    def prompt_order(self) -> PromptOrder:
        return self.inner.prompt_order

    def choose_drafts(
        self, offers: Sequence[DraftOffer], output: SchedulerOutput, view: SchedulerView
    ) -> Sequence[int]:
        return self.inner.choose_drafts(offers, output, view)

    def reset(self) -> None:
        self.inner.reset()

    def _joined(self, view: SchedulerView, gate: Gate, output: SchedulerOutput) -> SchedulerOutput:
        if gate.rejected:
            output = replace(output, rejected={**gate.rejected, **output.rejected})
        self.planned(view, gate, output)
        return output


def _shown(view: SchedulerView, gate: Gate) -> SchedulerView:
    if len(gate.through) == len(view.waiting):
        return view
    return replace(view, waiting=gate.through)
