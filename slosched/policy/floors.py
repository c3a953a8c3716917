"""Floors in front of any policy: tiers and tenants that get at least a share of the device."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import chain

from slosched.core import (
    BatchShape,
    DecodeGroup,
    Limits,
    Request,
    SchedulerOutput,
    SchedulerView,
    group_shape,
    tunable,
)
from slosched.policy.kit.checks import check_at_least
from slosched.policy.kit.turn import plan_turn
from slosched.policy.kit.wrapper import Gate, Wrapper


@dataclass
class Floors(Wrapper):
    """Gives a step to a tier or a tenant that has had less than its share while it had to wait.

    1. A class is a tier or a tenant with a floor.  It is backlogged if a step leaves some of its
       tokens uncomputed.  A step's time, as the latency model predicts it, belongs to the classes
       in proportion to the tokens that it computes for them.
    2. After each step that leaves it backlogged, a class is owed its floor's share of the step's
       time minus what it had of it.  A class that is not backlogged is owed nothing.
    3. While no class is owed anything, the inner policy plans.  What it gives to a class pays the
       debt, but is no advance on later floors.
    4. Else the next step is the turn of the class that is owed most (`plan_turn`): its requests
       come first, and decodes of others fill at most the rest of its share.  What a turn gives
       beyond the debt is an advance.

    So in any time in which a class is always backlogged it gets at least its floor's share of that
    time, minus the time of the longest step for each class that has a floor.  Without a latency
    model, tokens count in place of time.

    Source: ours, after deficit round robin (Shreedhar and Varghese, SIGCOMM '95), with a floor in
    the place of a quantum: only classes with a floor have a deficit, and the rest of the device is
    the inner policy's.
    """

    tiers: str | None = None
    """Floors by tier: "batch=0.2" or "batch=0.2/gold=0.3"."""
    tenants: str | None = None
    """Floors by tenant, in the same way."""
    turn_tokens: int = tunable(2048, 512)
    """Most tokens that a class computes in one turn."""

    def __post_init__(self) -> None:
        check_at_least(1, turn_tokens=self.turn_tokens)
        self._by_tier, self._by_tenant = _floors(self.tiers), _floors(self.tenants)
        self._share = {
            **{f"tier {name}": share for name, share in self._by_tier.items()},
            **{f"tenant {name}": share for name, share in self._by_tenant.items()},
        }
        total = sum(self._share.values())
        if not total < 1:
            raise ValueError(f"the floors add up to {total:g}; they must leave something to share")
        self.reset()

    def reset(self) -> None:
        super().reset()
        self._owed_s = dict.fromkeys(self._share, 0.0)
        self._beside: DecodeGroup | None = None
        """The decodes that the step being planned serves as a group."""
        self._was_turn = False
        """Whether the last step was the turn of a class, which the inner policy has not seen."""

    def classes_of(self, request: Request) -> tuple[str, ...]:
        """Return the classes with a floor that a request belongs to."""
        tier, tenant = request.tier, request.tenant
        if tier in self._by_tier:
            if tenant in self._by_tenant:
                return (f"tier {tier}", f"tenant {tenant}")
            return (f"tier {tier}",)
        return (f"tenant {tenant}",) if tenant in self._by_tenant else ()

    def schedule(self, view: SchedulerView) -> SchedulerOutput:
        owner = self._owner()
        if owner is not None:
            output = plan_turn(
                view,
                lambda request: owner in self.classes_of(request),
                self._share[owner],
                self.turn_tokens,
            )
            if output is not None:
                self._beside = None
                self._book(view, output, owner)
                self._was_turn = True
                return output
        return super().schedule(self._for_inner(view))

    def schedule_beside(self, decodes: DecodeGroup, view: SchedulerView) -> SchedulerOutput | None:
        if self._owner() is not None:
            return None
        return super().schedule_beside(decodes, self._for_inner(view))

    def decodes_until_s(self, decodes: DecodeGroup, limits: Limits) -> float:
        """Return the time of the inner policy, once a step has cleared all debts and advances."""
        if any(self._owed_s.values()):
            return -math.inf
        return super().decodes_until_s(decodes, limits)

    def gate(self, view: SchedulerView) -> Gate:
        self._beside = None
        return Gate(view.waiting, {})

    def gate_beside(self, decodes: DecodeGroup, view: SchedulerView) -> Gate:
        self._beside = decodes
        return Gate(view.waiting, {})

    def planned(self, view: SchedulerView, gate: Gate, output: SchedulerOutput) -> None:
        self._was_turn = False
        self._book(view, output, None)

    def _for_inner(self, view: SchedulerView) -> SchedulerView:
        """Return the view for the inner policy, which says whether a turn was before this step."""
        return replace(view, follows_another=True) if self._was_turn else view

    def _owner(self) -> str | None:
        """Return the class that is owed most; None if none is owed anything."""
        owed_s = self._owed_s
        owner = max(owed_s, key=owed_s.__getitem__, default=None)
        return owner if owner is not None and owed_s[owner] > 0 else None

    def _book(self, view: SchedulerView, output: SchedulerOutput, owner: str | None) -> None:
        """Count a planned step, the turn of `owner`, for all classes."""
        if not self._share:
            return
        num_tokens, backlogged = self._served(view, output)
        total = sum(output.num_scheduled_tokens.values())
        if self._beside is not None:
            total += self._beside.num_decodes
        step_s = float(total)
        if view.latency_model is not None:
            step_s = view.latency_model.predict(output.shape or self._shape(view, output))
        for name, share in self._share.items():
            if name not in backlogged:
                self._owed_s[name] = 0.0
                continue
            owed_s = self._owed_s[name]
            after_s = owed_s + step_s * (share - num_tokens[name] / total) if total else owed_s
            self._owed_s[name] = after_s if name == owner else max(min(owed_s, 0.0), after_s)

    def _served(
        self, view: SchedulerView, output: SchedulerOutput
    ) -> tuple[dict[str, int], set[str]]:
        """Return the tokens of each class in the step, and the classes left backlogged."""
        scheduled, found = output.num_scheduled_tokens, output.num_found_tokens
        num_tokens, backlogged = dict.fromkeys(self._share, 0), set[str]()
        if self._beside is not None:
            for classes, num in self._beside.num_by(self.classes_of).items():
                assert isinstance(classes, tuple)
                for name in classes:
                    num_tokens[name] += num
        classes_of = self.classes_of
        for request in chain(view.running, view.swapped, view.waiting):
            for name in classes_of(request):
                request_id = request.request_id
                num = scheduled.get(request_id, 0)
                prior = found.get(request_id, request.num_computed_tokens)
                num_tokens[name] += num
                if num < request.num_tokens - prior and request_id not in output.rejected:
                    backlogged.add(name)
        return num_tokens, backlogged

    def _shape(self, view: SchedulerView, output: SchedulerOutput) -> BatchShape:
        """Return the shape of a step whose plan does not say it."""
        shape = BatchShape() if self._beside is None else group_shape(self._beside)
        for request in chain(view.running, view.swapped, view.waiting):
            if num := output.num_scheduled_tokens.get(request.request_id):
                prior = output.num_found_tokens.get(request.request_id, request.num_computed_tokens)
                shape.add(num, prior)
        return shape


def _floors(text: str | None) -> dict[str, float]:
    """Return the floors of a text such as "batch=0.2/gold=0.3"."""
    floors: dict[str, float] = {}
    for part in filter(None, (text or "").split("/")):
        name, equals, share = part.partition("=")
        try:
            floors[name] = float(share)
            if not name or not equals or not 0 < floors[name] < 1:
                raise ValueError
        except ValueError:
            raise ValueError(
                f"{part!r} is no floor: write name=share, as in batch=0.2, with a share between 0 "
                "and 1; slashes stand between several"
            ) from None
    return floors
