"""Policies around a policy: they hold requests back or refuse them, and leave the rest to it."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from slosched.core import (
    DecodeGroup,
    EndReason,
    ForeseesDecodes,
    Limits,
    PlansBesideDecodes,
    Policy,
    Request,
    SchedulerOutput,
    SchedulerView,
)


class Gate(NamedTuple):
    """What becomes of the requests that wait; who is in neither is held back for this step."""

    through: Sequence[Request]
    """Shown to the inner policy, in the order in which they wait."""
    rejected: Mapping[str, EndReason]


@dataclass
class Wrapper(PlansBesideDecodes, ForeseesDecodes):
    """A policy that another one asks: the base of those that stand in front of any policy.

    The inner policy sees a view without the waiting requests that are held back or refused.  On
    the command line a wrapper follows what it wraps: `edf+early_rejection+past_future`.

    A subclass writes `gate`, and `gate_beside` for fast replays.  Both may be asked more than once
    before a step is planned, so what they learn must not depend on how often; what has to be
    remembered of a decision belongs into `planned`.  While nothing runs and nobody is swapped out,
    someone has to be let through or refused.
    """

    inner: Policy

    @abstractmethod
    def gate(self, view: SchedulerView) -> Gate:
        """Decide about those that wait."""

    def gate_beside(self, decodes: DecodeGroup, view: SchedulerView) -> Gate | None:
        """`gate` where the decodes are known as a group only; None to be shown each of them."""
        return None

    def planned(self, view: SchedulerView, gate: Gate, output: SchedulerOutput) -> None:
        """`output` is carried out: `gate` and what the inner policy made of it."""

    def schedule(self, view: SchedulerView) -> SchedulerOutput:
        gate = self.gate(view)
        return self._joined(view, gate, self.inner.schedule(_shown(view, gate)))

    def schedule_beside(self, decodes: DecodeGroup, view: SchedulerView) -> SchedulerOutput | None:
        """Plan beside the decodes if both this wrapper and the inner policy can."""
        inner = self.inner
        if not isinstance(inner, PlansBesideDecodes):
            return None
        gate = self.gate_beside(decodes, view)
        if gate is None:
            return None
        output = inner.schedule_beside(decodes, _shown(view, gate))
        return None if output is None else self._joined(view, gate, output)

    def decodes_until_s(self, decodes: DecodeGroup, limits: Limits) -> float:
        """Return the time of the inner policy: no request waits, so there is nothing to gate."""
        inner = self.inner
        if not isinstance(inner, ForeseesDecodes):
            return -math.inf
        return inner.decodes_until_s(decodes, limits)

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
