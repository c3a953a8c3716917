"""What no scheduler can exceed, for the windows of a sweep."""

from __future__ import annotations

from collections.abc import Sequence

from slosched.engine.simulate import SimulationConfig
from slosched.evaluate.bounds import CapacityBound, capacity_bound
from slosched.evaluate.capacity.pool import MakePool
from slosched.perfmodel import FittedModel
from slosched.workload.trace import Trace

_TOLERANCE = 0.03
"""The bound may be so much too generous: half as much would take a minute more."""


def bound_windows(
    windows: Sequence[Trace],
    model: FittedModel,
    config: SimulationConfig,
    targets: Sequence[float],
    make_pool: MakePool,
) -> dict[float, CapacityBound]:
    """By target, the bound on the window that allows most: above it every window misses it.

    A bound counts all requests of a window, a capacity those after the warm-up; where the first
    are the easier ones, as after an idle time, that is on the policies' side.
    """
    with make_pool(_nothing) as pool:
        asked = {
            target: [pool.submit(_bound, w, model, config, target) for w in windows]
            for target in targets
        }
        found = {target: [future.result() for future in asked[target]] for target in targets}
    return {target: max(found[target], key=lambda bound: bound.rate) for target in targets}


def _bound(
    window: Trace, model: FittedModel, config: SimulationConfig, target: float
) -> CapacityBound:
    return capacity_bound(window, model, config, target, tolerance=_TOLERANCE)


def _nothing() -> None:
    """Such workers share no bench."""
