"""The figure of a fleet's size: replicas that hold devices over time, beside the arrivals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from slosched.evaluate.plots.style import GREY, WIDTH_IN, legend_above, look, tidy
from slosched.fleet.scaling import Lease
from slosched.metrics import RequestRecord
from slosched.metrics.columns import FloatArray

_NUM_BINS = 120


def replicas_over_time(
    leases: Mapping[str, Sequence[Lease]], records: Mapping[str, Sequence[RequestRecord]]
) -> Figure:
    """Draw how many replicas of each fleet hold devices, and below it the requests that arrive.

    `leases` has the replicas of each fleet, and `records` the requests of its replay.  Replicas
    that start or drain are counted, as they are paid for.
    """
    figure = Figure(figsize=(WIDTH_IN, 4.6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
    for i, (name, held) in enumerate(leases.items()):
        times_s, counts = _counts(held)
        style = {"color": look(i).colour, "linestyle": look(i).dash, "linewidth": 1.6}
        above.step(times_s, counts, where="post", label=name, **style)
    arrivals_s = np.array([r.arrival_s for r in records[next(iter(leases))]])
    rates, edges_s = np.histogram(arrivals_s, bins=min(_NUM_BINS, max(1, len(arrivals_s) // 20)))
    width_s = np.diff(edges_s)
    below.stairs(rates / np.where(width_s > 0, width_s, 1.0), edges_s, color=GREY, fill=True)
    above.set(ylabel="replicas")
    above.set_ylim(bottom=0)
    above.yaxis.set_major_locator(MaxNLocator(integer=True))
    below.set(xlabel="seconds since the first arrival", ylabel="requests/s")
    for axes in (above, below):
        tidy(axes)
    legend_above(figure)
    return figure


def _counts(leases: Sequence[Lease]) -> tuple[FloatArray, FloatArray]:
    """Return the times at which the number of held replicas changes, and the number from then."""
    changes: dict[float, int] = {}
    for lease in leases:
        assert lease.until_s is not None
        changes[lease.from_s] = changes.get(lease.from_s, 0) + 1
        changes[lease.until_s] = changes.get(lease.until_s, 0) - 1
    times_s = sorted(changes)
    counts = np.cumsum([changes[at_s] for at_s in times_s]).astype(np.float64)
    # The end of all is not a change of the fleet's size.
    return np.array(times_s), np.append(counts[:-1], counts[-2 if len(counts) > 1 else -1])
