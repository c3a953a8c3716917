"""What no scheduler can exceed, for the windows of a sweep."""

from __future__ import annotations

from collections.abc import Sequence

from slosched.engine.simulate import SimulationConfig
from slosched.evaluate.bounds import CapacityBound, capacity_bound
from slosched.evaluate.capacity.pool import MakePool
from slosched.perfmodel import FittedModel
from slosched.workload.trace import Trace


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
            target: [pool.submit(capacity_bound, w, model, config, target) for w in windows]
            for target in targets
        }
        found = {target: [future.result() for future in asked[target]] for target in targets}
    return {target: max(found[target], key=lambda bound: bound.rate) for target in targets}


def _nothing() -> None:
    """Such workers share no bench."""
