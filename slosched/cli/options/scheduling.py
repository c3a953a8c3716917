"""The options for the policy, its latency model and the limits of a step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

import typer

from slosched.cli.options.values import is_given
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

_CPU_TOKENS, _CPU_SEQS = 512, 32
"""The limits of a step on a CPU, where one of 2,048 tokens takes seconds."""


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
    max_num_batched_tokens: Annotated[
        int,
        typer.Option(min=1, help="Most tokens in one step.  On a CPU the default is 512."),
    ] = 2048
    max_num_seqs: Annotated[
        int,
        typer.Option(min=1, help="Most requests that run at once.  On a CPU the default is 32."),
    ] = 256

    def on(self, context: typer.Context, *, is_cpu: bool) -> LimitOptions:
        """Return these options, with a CPU's limits where a model runs on one and none is given."""
        if not is_cpu:
            return self
        tokens, seqs = self.max_num_batched_tokens, self.max_num_seqs
        if not is_given(context, "max_num_batched_tokens"):
            tokens = _CPU_TOKENS
        if not is_given(context, "max_num_seqs"):
            seqs = _CPU_SEQS
        return replace(self, max_num_batched_tokens=tokens, max_num_seqs=seqs)

    def described(self) -> str:
        """Return the size of the largest step in words."""
        return f"{self.max_num_batched_tokens} tokens and {self.max_num_seqs} requests"

    def limits(self) -> Limits:
        return Limits(
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_num_seqs=self.max_num_seqs,
            preemption_mode=self.preemption,
            deadline_rule=self.deadline_rule,
        )
