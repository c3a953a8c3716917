"""Simulated replays for `replay`, `compare` and `demo`: one replica, any number of policies."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import typer
from rich.progress import TaskID

from slosched.cli import options
from slosched.cli.console import progress_bar
from slosched.cli.results import Outcome
from slosched.core import Limits, Policy, Request
from slosched.engine.simulate import SimulationConfig, simulate
from slosched.evaluate.metrics import RequestRecord, StepRow
from slosched.perfmodel import DEFAULT_MODEL, FittedModel, load_model
from slosched.workload import Trace

_DEFAULT_KV_TOKENS = 131_072
"""Where neither the command line nor the latency model's provenance says how large the cache is."""


@dataclass(frozen=True)
class Replica:
    """The device that is simulated and its limits."""

    model: FittedModel
    model_name: str
    config: SimulationConfig

    def provenance(self) -> dict[str, object]:
        config = self.config
        return {
            "latency model": self.model_name,
            "kv_tokens": config.num_blocks * config.block_size,
            "noise": config.noise,
            "drift": config.drift,
            "online": config.online,
            "seed": config.seed,
            **{f"limit {name}": value for name, value in _limits(config.limits).items()},
            **{f"measured {name}": value for name, value in self.model.provenance.items()},
        }


@dataclass(frozen=True)
class ReplicaOptions:
    """The replica that is simulated."""

    latency_model: options.LatencyModelName = None
    noise: Annotated[
        float,
        typer.Option(min=0, help="Sigma of a lognormal factor on every simulated step's time."),
    ] = 0.0
    drift: Annotated[
        float,
        typer.Option(
            help="Share by which the simulated device gets slower and faster, over two minutes: "
            "0.2 for 20 %."
        ),
    ] = 0.0
    online: Annotated[
        bool,
        typer.Option(
            "--online",
            help="Let the policy's latency model learn from the simulated steps, as `serve` does.",
        ),
    ] = False

    def open(self, limits: Limits, kv: options.KVOptions, seed: int) -> Replica:
        """With a bundled GPU by default."""
        if not 0 <= self.noise < math.inf:
            raise ValueError(f"noise must be a finite number >= 0, not {self.noise!r}")
        if not 0 <= self.drift < 1:
            raise ValueError(f"drift must be a share in [0, 1), not {self.drift!r}")
        name = self.latency_model or DEFAULT_MODEL
        model = load_model(name)
        config = SimulationConfig(
            limits=limits,
            num_blocks=kv.num_blocks(kv_capacity_tokens(model)),
            block_size=kv.block_size,
            num_host_blocks=kv.num_host_blocks,
            noise=self.noise,
            drift=self.drift,
            online=self.online,
            seed=seed,
        )
        return Replica(model, name, config)


def kv_capacity_tokens(model: FittedModel) -> int:
    """What the measured device's KV cache held, as far as the model's provenance says."""
    return int(model.provenance.get("kv_capacity_tokens", _DEFAULT_KV_TOKENS))


def simulate_policies(
    trace: Trace, policies: Mapping[str, Policy], replica: Replica
) -> dict[str, Outcome]:
    """Each policy on the same arrivals and the same device, with a progress bar."""
    outcomes = {}
    with progress_bar() as progress:
        for name, policy in policies.items():
            task = progress.add_task(f"simulating {name}", total=len(trace))
            steps: list[StepRow] = []

            def on_row(
                row: StepRow,
                ended: Sequence[Request],
                task: TaskID = task,
                rows: list[StepRow] = steps,
            ) -> None:
                rows.append(row)
                if ended:
                    progress.advance(task, len(ended))

            requests = simulate(trace, policy, replica.model, replica.config, on_row=on_row)
            outcomes[name] = Outcome([RequestRecord.from_request(r) for r in requests], steps)
    return outcomes


def _limits(limits: Limits) -> dict[str, object]:
    names = ("max_num_batched_tokens", "max_num_seqs", "preemption_mode", "deadline_rule")
    return {name: getattr(limits, name) for name in names}
