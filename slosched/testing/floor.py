"""The law of floors: while a class is backlogged, it gets its share of the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import chain

from slosched.core import BatchShape, Policy, SchedulerOutput, SchedulerView
from slosched.simulator.simulate import simulate
from slosched.testing.plans import require
from slosched.testing.scenario import Scenario, device_model
from slosched.workload import Trace

CLASS = "mine"
"""The tier of the requests with a floor."""


@dataclass(frozen=True)
class WatchedStep:
    """One step, as the law sees it."""

    step_s: float
    """The predicted time of the step."""
    class_s: float
    """The part of it that belongs to the class, by its share of the tokens."""
    is_backlogged: bool
    """Whether the step leaves tokens of the class uncomputed."""


@dataclass
class _Watch(Policy):
    """Plans as another policy does, and writes down what each step gives to the class."""

    inner: Policy
    steps: list[WatchedStep] = field(default_factory=list)

    def schedule(self, view: SchedulerView) -> SchedulerOutput:
        output = self.inner.schedule(view)
        shape = BatchShape()
        num_mine = num_all = 0
        is_backlogged = False
        for request in chain(view.running, view.swapped, view.waiting):
            num = output.num_scheduled_tokens.get(request.request_id, 0)
            prior = output.num_found_tokens.get(request.request_id, request.num_computed_tokens)
            num_all += num
            if num:
                shape.add(num, prior)
            if request.tier == CLASS:
                num_mine += num
                has_left = num < request.num_tokens - prior
                is_backlogged |= has_left and request.request_id not in output.rejected
        if output.shape is not None:
            shape.num_swapped_blocks = output.shape.num_swapped_blocks
        step_s = view.model.predict(shape) if num_all else 0.0
        class_s = step_s * num_mine / num_all if num_all else 0.0
        self.steps.append(WatchedStep(step_s, class_s, is_backlogged))
        return output

    def reset(self) -> None:
        self.inner.reset()
        self.steps.clear()


def check_floor(
    make_policy: Callable[[], Policy],
    scenario: Scenario,
    share: float,
    num_floors: int = 1,
) -> int:
    """Raise LawBrokenError if the tier "mine" gets less than its share; return backlogged steps.

    Over any steps in a row of which each leaves the tier backlogged, it gets at least `share` of
    their time minus `num_floors` times the longest step.  Every second request is of this tier, the
    others of the tier "others".
    """
    watch = _Watch(make_policy())
    requests = simulate(_tiered(scenario.trace()), watch, device_model(), scenario.config())
    require(all(r.status.is_ended for r in requests), "a request has no end")
    longest_s = max((step.step_s for step in watch.steps), default=0.0)
    owed_s = 0.0
    for i, step in enumerate(watch.steps):
        due_s = share * step.step_s - step.class_s
        owed_s = max(0.0, owed_s + due_s) if step.is_backlogged else 0.0
        require(
            owed_s <= num_floors * longest_s * (1 + 1e-9),
            f"until step {i} the class is owed {owed_s:g} s; a step takes {longest_s:g} s at most",
        )
    return sum(step.is_backlogged for step in watch.steps)


def _tiered(trace: Trace) -> Trace:
    requests = [replace(r, tier="others" if i % 2 else CLASS) for i, r in enumerate(trace.requests)]
    return Trace.of(requests, trace.name, trace.provenance, trace.prefix_block_tokens)
