"""What /metrics shows of the latency model and of a portfolio."""

from __future__ import annotations

from collections.abc import Iterator

from slosched.core import LatencyModel, Policy
from slosched.engine.server.prometheus import sample, samples
from slosched.perfmodel import OnlineModel
from slosched.policy.portfolio.policy import portfolio_in


def latency_model_lines(model: LatencyModel | None, label: str) -> Iterator[str]:
    """Yield how biased the fitted model is, and how often steps exceeded its upper bound."""
    if not isinstance(model, OnlineModel):
        return
    states = {f'{label},regime="{regime}"': state for regime, state in model.regimes.items()}
    for name, kind, text, values in (
        (
            "slosched:latency_model_bias",
            "gauge",
            "Measured over fitted step time, lately.",
            {labels: state.bias for labels, state in states.items()},
        ),
        (
            "slosched:latency_model_margin",
            "gauge",
            "The step time that 1 % exceed over the predicted one.",
            {labels: state.margin for labels, state in states.items()},
        ),
        (
            "slosched:steps_observed_total",
            "counter",
            "Steps that the latency model has learnt from.",
            {labels: state.num_steps for labels, state in states.items()},
        ),
        (
            "slosched:steps_over_upper_total",
            "counter",
            "Those that took longer than the upper bound predicted for them.",
            {labels: state.num_over for labels, state in states.items()},
        ),
    ):
        yield from samples(name, kind, text, values)


def portfolio_lines(policy: Policy, label: str) -> Iterator[str]:
    """Yield which candidate of a portfolio plans, and what the replays found and cost."""
    portfolio = portfolio_in(policy)
    if portfolio is None:
        return
    for name, text, value in (
        ("evaluations", "Answers of the simulator.", portfolio.num_evaluations),
        ("changes", "Times at which another candidate took over.", portfolio.num_changes),
        ("cpu_seconds", "Processor time of the replays.", portfolio.cpu_s),
    ):
        yield from sample(f"slosched:portfolio_{name}_total", "counter", text, label, value)
    plans = {
        f'{label},policy="{spec}"': int(spec == portfolio.current) for spec in portfolio.candidates
    }
    yield from samples("slosched:portfolio_plans", "gauge", "1 if it plans now.", plans)
    latest = next(reversed(portfolio.evaluations), None)
    if latest is not None and latest.scores:
        shares = {f'{label},policy="{s}"': score.share for s, score in latest.scores.items()}
        text = "Share of good requests in the latest replays."
        yield from samples("slosched:portfolio_share", "gauge", text, shares)
