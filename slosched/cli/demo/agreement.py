"""The demo's comparison: the live replays, and the same replays in the simulator."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from slosched.cli.console import console, table
from slosched.cli.demo.setup import BASELINE, LABELS, LIVE, REPLICA, RULE, SPECS, DemoError, Files
from slosched.cli.live_steps import LiveSteps
from slosched.cli.outcome_table import outcome_table
from slosched.cli.simulation import simulate_contenders
from slosched.evaluate.comparison import Outcome, Replica, compare, summarize_all
from slosched.perfmodel import FittedModel, fit, load_model, read_profile
from slosched.policy.spec import make_policy
from slosched.replay.files import read_records
from slosched.simulator.disturbances import Disturbances
from slosched.simulator.measured_speed import (
    WINDOW_S,
    in_replay_time,
    mean_slowness,
    measured_speed,
)
from slosched.workload import Trace, read_trace

if TYPE_CHECKING:
    import pandas as pd

_SIMULATIONS = 9
"""Simulations from whose attainments the mean is told; one request of 60 is 1.7 points."""


def compare_with_simulator(
    files: Files, model: str, recorded: Mapping[str, LiveSteps], seed: int
) -> None:
    """Print tables of the live and simulated outcomes, and write one report of both.

    The simulated device is as slow, in every stretch of some seconds, as this machine was while it
    served the same policy, and under the policies that were not served as it was under the
    baseline.
    """
    import pandas as pd  # slow to import

    now = load_model(files.model_now)
    trace = read_trace(files.trace)
    served = {
        policy: Outcome(read_records(files.live(policy) / "records.jsonl").records)
        for policy in LIVE
    }
    speeds = {policy: _speed(policy, recorded[policy], now, served[policy]) for policy in LIVE}
    told = "\n".join(speed.told for speed in speeds.values())
    console.print(told)
    live = {LABELS[policy]: outcome for policy, outcome in served.items()}
    replicas = {
        name: _replica(files, now, speeds.get(name, speeds[BASELINE]), seed) for name in SPECS
    }
    contenders = {LABELS[name]: (make_policy(SPECS[name]), replicas[name]) for name in SPECS}
    simulated = simulate_contenders(trace, contenders).complete()
    again = {policy: _attainments(trace, SPECS[policy], replicas[policy]) for policy in LIVE}
    console.print(outcome_table(f"Live: {model} on this machine", summarize_all(live, RULE)))
    title = "Simulated with the fitted model, as fast as this machine was"
    console.print(outcome_table(title, summarize_all(simulated, RULE)))
    agreement = pd.DataFrame(
        _agreement(policy, speeds[policy], live[LABELS[policy]], again[policy]) for policy in LIVE
    )
    _print_agreement(agreement)
    agreement.to_csv(files.agreement, index=False, float_format="%.4f")
    _report(files, trace, live, simulated, told, replicas[BASELINE])
    console.print(f"wrote {files.report}", markup=False)


def _attainments(trace: Trace, spec: str, replica: Replica) -> list[float]:
    """Return the attainment in simulations that differ in how their steps scatter alone."""
    seeds = range(replica.config.seed, replica.config.seed + _SIMULATIONS)
    configs = [replace(replica.config, seed=seed) for seed in seeds]
    contenders = {
        str(config.seed): (make_policy(spec), replace(replica, config=config)) for config in configs
    }
    outcomes = compare(trace, contenders).complete().values()
    return [outcome.summary(RULE).attainment for outcome in outcomes]


def _agreement(
    policy: str, speed: _Speed, live: Outcome, simulated: Sequence[float]
) -> dict[str, object]:
    """Return a row of what was live, what was simulated, and how fast the machine was then."""
    return {
        "policy": policy,
        "live": live.summary(RULE).attainment,
        "simulated_mean": statistics.fmean(simulated),
        "simulated_least": min(simulated),
        "simulated_most": max(simulated),
        "slowness_mean": speed.mean_slowness,
        "slowness_least": min(speed.factors),
        "slowness_most": max(speed.factors),
    }


def _print_agreement(agreement: pd.DataFrame) -> None:
    rows = [
        (
            LABELS[str(row["policy"])],
            f"{row['live']:.1%}",
            f"{row['simulated_mean']:.1%}",
            f"{row['simulated_least']:.1%} to {row['simulated_most']:.1%}",
            f"{100 * (row['simulated_mean'] - row['live']):+.1f} points",
        )
        for _, row in agreement.iterrows()
    ]
    title = "Good requests: does the simulator tell what the server does?"
    mean_of = f"mean of {_SIMULATIONS}"
    console.print(table(title, ("policy", "live", mean_of, "between", "difference"), rows))


@dataclass(frozen=True)
class _Speed:
    """The speed of this machine while it served a policy, over what the model says."""

    policy: str
    disturbances: Disturbances
    mean_slowness: float

    @property
    def factors(self) -> list[float]:
        """The slowness in each stretch of the replay."""
        return [factor for _, factor in self.disturbances.slowness]

    @property
    def told(self) -> str:
        return (
            f"While {self.policy} was served, steps took {self.mean_slowness:.2f} times as long as "
            f"the model says ({min(self.factors):.2f} to {max(self.factors):.2f} in stretches of "
            f"{WINDOW_S:g} s), and scattered by {self.disturbances.noise:.0%} about that.  So does "
            "the simulated device."
        )


def _speed(policy: str, recorded: LiveSteps, model: FittedModel, served: Outcome) -> _Speed:
    """Return the machine's speed while `policy` was served, from the steps of the replay.

    They end with the last token that a client got.  Raises DemoError if no step was recorded.
    """
    last_end_s = max((r.token_times_s[-1] for r in served.records if r.token_times_s), default=0.0)
    steps = in_replay_time(recorded.all(), last_end_s)
    if not steps:
        raise DemoError(f"no step was recorded while {policy} was served")
    return _Speed(policy, measured_speed(steps, model), mean_slowness(steps, model))


def _replica(files: Files, model: FittedModel, speed: _Speed, seed: int) -> Replica:
    """Return a replica of this machine at that speed, whose policy learns from the steps."""
    config = replace(REPLICA, disturbances=speed.disturbances, online=True, seed=seed)
    return Replica.of(model, str(files.model_now), config, model.server_time)


def _report(
    files: Files,
    trace: Trace,
    live: Mapping[str, Outcome],
    simulated: Mapping[str, Outcome],
    told: str,
    replica: Replica,
) -> None:
    from slosched.cli.figures import fit_section  # slow to import
    from slosched.cli.replay_report import comparison_section
    from slosched.evaluate.report import write_report

    what = (
        f"{len(trace)} requests of the Azure conversation mix with lengths divided by 8, at "
        f"{trace.rate:.3g} requests/s, judged by the deadline rule {RULE}. Rejected and "
        f"unfinished requests count as misses. The policies are {', '.join(SPECS.values())}."
    )
    sections = [
        comparison_section("Live", f"A real model behind a real server. {what}", live, RULE),
        comparison_section(
            "Simulated",
            f"The same trace on the fitted latency model. {told} {what}",
            simulated,
            RULE,
        ),
        fit_section(fit(read_profile(files.profile))),
    ]
    write_report(files.report, "slosched demo", sections, replica.provenance())
