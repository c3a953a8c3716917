"""The options for the policy, its latency model and the limits of a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from slosched.core import DeadlineRule, Limits, PreemptionMode

PolicyName = Annotated[
    str,
    typer.Option(
        "--policy",
        "-p",
        metavar="NAME[:option=value,…][+WRAPPER…]",
        help="Scheduling policy: edf:drop=expired.  `slosched policies` lists all.",
    ),
]
LatencyModelName = Annotated[
    str | None,
    typer.Option(
        "--latency-model",
        metavar="FILE|NAME",
        help="A latency model that `slosched fit` saved (model.json), or a bundled one "
        "(h100/llama-3.1-8b; `slosched profile --list` shows all).",
    ),
]


@dataclass(frozen=True)
class LimitOptions:
    """The options for a scheduler's limits, and the deadline rule of policy and metrics."""

    deadline_rule: Annotated[
        DeadlineRule,
        typer.Option(
            help="The rule for when a token is on time, for both the policy and the metrics."
        ),
    ] = DeadlineRule.MEAN_TPOT
    preemption: Annotated[
        PreemptionMode,
        typer.Option(
            help="What happens to the KV cache of a preempted request: it is computed again or "
            "swapped to host memory."
        ),
    ] = PreemptionMode.RECOMPUTE
    max_num_batched_tokens: Annotated[int, typer.Option(min=1, help="Most tokens in one step.")] = (
        2048
    )
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Most requests that run at once.")] = 256

    def limits(self) -> Limits:
        return Limits(
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_num_seqs=self.max_num_seqs,
            preemption_mode=self.preemption,
            deadline_rule=self.deadline_rule,
        )
