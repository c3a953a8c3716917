"""Simulated replays for `replay`, `compare` and `demo`: one replica, any number of policies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any

import typer
from rich.progress import Progress

from slosched.cli import options
from slosched.cli.console import progress_bar
from slosched.cli.inert import note_inert
from slosched.cli.results import Outcome
from slosched.core import Limits, Policy, Request
from slosched.kv import HostWrites, PrefixCaching
from slosched.metrics import RequestRecord, StepRow
from slosched.perfmodel import DEFAULT_MODEL, FittedModel, load_model
from slosched.simulator.disturbances import Disturbances
from slosched.simulator.scheduling_time import MEASURED, ScheduleTime
from slosched.simulator.simulate import SimulationConfig, simulate
from slosched.workload import Trace

_DEFAULT_KV_TOKENS = 131_072
"""Where neither the command line nor the latency model's provenance says how large the cache is."""


@dataclass(frozen=True)
class Stall:
    """How long the device stands still at a time, and how long it runs in between."""

    lasts_s: float
    every_s: float


def stall(text: str) -> Stall:
    """As "200ms/10s"; a complaint that typer shows beside the option's name."""
    lasts, slash, every = text.partition("/")
    if not slash:
        raise typer.BadParameter(f"{text!r} is not TIME/EVERY, as in 200ms/10s")
    return Stall(options.duration(lasts), options.duration(every))


def schedule_time(text: str) -> ScheduleTime:
    """As "5ms" or "measured"; a complaint that typer shows beside the option's name."""
    return MEASURED if text == MEASURED else options.duration(text)


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
            "prefix_cache": config.prefix_cache,
            "prefix_host_tokens": config.prefix_host.num_blocks * config.block_size,
            "prefix_host_writes": config.prefix_host.writes,
            **asdict(config.disturbances),
            "bias": config.bias,
            "online": config.online,
            "schedule_s": config.schedule_s,
            "overlap": config.overlap,
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
    tail: Annotated[
        float,
        typer.Option(
            help="Share of the simulated steps that are slow, from twice as long without a limit: "
            "0.01 for 1 %."
        ),
    ] = 0.0
    stall: Annotated[
        Stall | None,
        typer.Option(
            parser=stall,
            metavar="TIME/EVERY",
            help="The simulated device stands still at random: 200ms/10s, every 10 s on average.",
        ),
    ] = None
    bias: Annotated[
        float,
        typer.Option(
            help="What simulated steps take over what the policy is told: at 1.2 they take 20 % "
            "longer. The device stays as it is."
        ),
    ] = 1.0
    online: Annotated[
        bool,
        typer.Option(
            "--online",
            help="Let the policy's latency model learn from the simulated steps, as `serve` does.",
        ),
    ] = False
    schedule_time: Annotated[
        # `ScheduleTime`, but typer takes no unions.
        Any,
        typer.Option(
            parser=schedule_time,
            metavar="TIME|measured",
            help="What each decision takes: 5ms, or as long as it does here (not reproducible).",
        ),
    ] = None
    overlap: Annotated[
        bool,
        typer.Option(
            "--overlap",
            help="Plan each step while the one before it runs: the plan is one step stale, its "
            "time is hidden.",
        ),
    ] = False
    max_loras: Annotated[
        int | None,
        typer.Option(min=1, help="Different LoRA adapters in one step.  Default: no limit."),
    ] = None
    prefix_cache: options.PrefixCache = PrefixCaching.OFF
    prefix_host_tokens: options.PrefixHostTokens = 0
    prefix_host_writes: options.PrefixHostWrites = HostWrites.BACK

    def open(self, limits: Limits, kv: options.KVOptions, seed: int) -> Replica:
        """With a bundled GPU by default."""
        disturbances = Disturbances(self.noise, self.drift, self.tail)
        if self.stall is not None:
            lasts_s, every_s = self.stall.lasts_s, self.stall.every_s
            disturbances = replace(disturbances, stall_s=lasts_s, stall_every_s=every_s)
        name = DEFAULT_MODEL if self.latency_model is None else self.latency_model
        model = load_model(name)
        host = (self.prefix_host_tokens, self.prefix_host_writes, kv.block_size)
        config = SimulationConfig(
            limits=replace(limits, max_loras=self.max_loras),
            num_blocks=kv.num_blocks(kv_capacity_tokens(model)),
            block_size=kv.block_size,
            num_host_blocks=kv.num_host_blocks,
            prefix_cache=self.prefix_cache,
            prefix_host=options.prefix_host(self.prefix_cache, *host),
            disturbances=disturbances,
            bias=self.bias,
            online=self.online,
            schedule_s=self.schedule_time or 0.0,
            overlap=self.overlap,
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
    note_inert(trace, policies, replica.config)
    with progress_bar() as progress:
        return {
            name: _simulated(trace, name, policy, replica, progress)
            for name, policy in policies.items()
        }


@dataclass(frozen=True)
class Simulated:
    """What became of contenders: one that fails, or Ctrl-C, leaves what the others have done."""

    outcomes: dict[str, Outcome]
    failed: dict[str, Exception]
    stopped: bool = False

    @property
    def is_whole(self) -> bool:
        return not (self.failed or self.stopped)


def simulate_contenders(
    trace: Trace, contenders: Mapping[str, tuple[Policy, Replica]]
) -> Simulated:
    """Each on its device, with a progress bar; raises only where there is no outcome at all."""
    policies = {name: policy for name, (policy, _) in contenders.items()}
    note_inert(trace, policies, next(iter(contenders.values()))[1].config)
    done = Simulated({}, {})
    with progress_bar() as progress:
        for name, (policy, replica) in contenders.items():
            try:
                done.outcomes[name] = _simulated(trace, name, policy, replica, progress)
            except KeyboardInterrupt:
                if not done.outcomes:
                    raise
                return replace(done, stopped=True)
            except Exception as error:  # of a policy, whose others are worth having
                done.failed[name] = error
    if not done.outcomes:
        raise next(iter(done.failed.values()))
    return done


def _simulated(
    trace: Trace, name: str, policy: Policy, replica: Replica, progress: Progress
) -> Outcome:
    task = progress.add_task(f"simulating {name}", total=len(trace))
    steps: list[StepRow] = []

    def on_row(row: StepRow, ended: Sequence[Request]) -> None:
        steps.append(row)
        if ended:
            progress.advance(task, len(ended))

    requests = simulate(trace, policy, replica.model, replica.config, on_row=on_row)
    return Outcome([RequestRecord.from_request(request) for request in requests], steps)


def _limits(limits: Limits) -> dict[str, object]:
    names = ("max_num_batched_tokens", "max_num_seqs", "preemption_mode", "deadline_rule")
    loras = {} if limits.max_loras is None else {"max_loras": limits.max_loras}
    return {name: getattr(limits, name) for name in names} | loras
