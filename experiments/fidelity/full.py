"""Full servers with steps as long as measured: are their queues as simulated?

One number is taken from each run, the mean time of a token.  So this does not judge the latency
model; it judges all the rest.
"""

from __future__ import annotations

from experiments.fidelity.play import play
from experiments.fidelity.stages import Run
from slosched.perfmodel import FittedModel
from slosched.perfmodel.forms import scaled

FULL = "full"
"""The name of the results."""


def is_full(run: Run) -> bool:
    """Tell whether the run is one stage of load that the server could not keep up with."""
    return len(run) == 1 and run[0].is_saturated


def play_with_measured_steps(run: Run, model: FittedModel) -> dict[str, str | float]:
    """Return what a client sees if steps are slower by what the mean simulated token lacks."""
    [stage] = run
    [seen] = play(run, model)
    simulated_s = (seen["e2e_mean_s"] - seen["ttft_mean_s"]) / (stage.output_tokens - 1)
    factor = stage.tpot_mean_s / simulated_s
    [again] = play(run, scaled(model, factor))
    return {"run": stage.run, "factor": factor, **again}
