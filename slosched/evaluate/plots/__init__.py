"""Figures.  Each is a function that returns a new `matplotlib.figure.Figure`.

pyplot and its global state are not used, so that no display is needed and nothing must be closed.
`style` defines how curves and bars can be distinguished without colour.
"""

from slosched.evaluate.plots.capacity import attainment_curves, goodput_curves
from slosched.evaluate.plots.comparison import goodput_bars, outcome_bars
from slosched.evaluate.plots.fairness import MAX_TIERS, decile_lines, promised, tier_bars
from slosched.evaluate.plots.fit import fit_plot
from slosched.evaluate.plots.frontier import cost_frontier
from slosched.evaluate.plots.latency import gap_tails, latency_cdfs
from slosched.evaluate.plots.replicas import replicas_over_time
from slosched.evaluate.plots.style import folded
from slosched.evaluate.plots.timeline import timeline

__all__ = [
    "MAX_TIERS",
    "attainment_curves",
    "cost_frontier",
    "decile_lines",
    "fit_plot",
    "folded",
    "gap_tails",
    "goodput_bars",
    "goodput_curves",
    "latency_cdfs",
    "outcome_bars",
    "promised",
    "replicas_over_time",
    "tier_bars",
    "timeline",
]
