"""Policies side by side: each replays the same trace on a simulated replica."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from slosched.core import DeadlineRule, Limits, Policy, Request
from slosched.fleet.scaling import Lease
from slosched.fleet.split_setup import AnyFleet
from slosched.kv import Eviction
from slosched.metrics import RequestRecord, StepRow, Summary, records_of, summarize
from slosched.perfmodel import (
    NO_SERVER_TIME,
    FittedModel,
    ServerTime,
    with_longer_steps,
)
from slosched.policy.portfolio.evaluation import Evaluation
from slosched.policy.portfolio.policy import portfolio_in
from slosched.simulator.simulate import SimulationConfig, simulate
from slosched.workload import Trace

_DEFAULT_KV_TOKENS = 131_072
"""Size of the KV cache where neither the user nor the latency model's provenance gives one."""

OnProgress = Callable[[str, int], None]
"""A function that is called with a contender and how many of its requests have ended since.

It is called with 0 when a contender begins."""


@dataclass(frozen=True)
class Replica:
    """A simulated device and its limits."""

    model: FittedModel
    model_name: str
    config: SimulationConfig
    server_time: ServerTime = NO_SERVER_TIME
    """What `model` and `config` hold of a server's times."""
    fleet: AnyFleet | None = None
    """The fleet that is simulated in its place, of which it is the first replica."""

    @classmethod
    def of(
        cls, model: FittedModel, name: str, config: SimulationConfig, server_time: ServerTime
    ) -> Replica:
        """Return a replica whose server adds `server_time` to what `model` says of the device.

        What every step takes longer becomes a part of the latency model, so that policies and
        bounds know of it.  The host's time is such a part, too, unless the next step is planned
        while one runs.
        """
        overlap = config.overlap
        hidden_s = server_time.per_step_host_s if overlap else 0.0
        config = replace(
            config,
            per_request_s=server_time.per_request_s,
            schedule_s=config.schedule_s or hidden_s,
        )
        longer = with_longer_steps(model, server_time.per_step_s(overlap=overlap))
        return cls(longer, name, config, server_time)

    def provenance(self) -> dict[str, object]:
        """Return everything that results on this replica depend on, by name."""
        config = self.config
        return {
            "latency model": self.model_name,
            "kv_tokens": config.num_blocks * config.block_size,
            "prefix_cache": config.prefix_cache,
            **(
                {}
                if config.eviction is Eviction.LRU
                else {"prefix_cache_eviction": config.eviction}
            ),
            "prefix_host_tokens": config.prefix_host.num_blocks * config.block_size,
            "prefix_host_writes": config.prefix_host.writes,
            **asdict(config.disturbances),
            "bias": config.bias,
            "online": config.online,
            **asdict(self.server_time),
            "schedule_s": config.schedule_s,
            "overlap": config.overlap,
            "client_timeout_s": config.client_timeout_s,
            **({} if config.drafts is None else {"drafts": asdict(config.drafts)}),
            **({} if config.window_tokens is None else {"window_tokens": config.window_tokens}),
            "seed": config.seed,
            **{f"limit {name}": value for name, value in _limits(config.limits).items()},
            **{f"measured {name}": value for name, value in self.model.provenance.items()},
            **({} if self.fleet is None else self.fleet.provenance()),
        }


@dataclass
class Outcome:
    """The requests and steps of one policy's replay."""

    records: Sequence[RequestRecord]
    steps: list[StepRow] = field(default_factory=list)
    """The steps of the replica; those of a fleet, which run side by side, are not kept."""
    leases: Sequence[Lease] = ()
    """When each replica of a fleet held its devices."""
    evaluations: Sequence[Evaluation] | None = None
    """Those of a portfolio, perhaps none; None for another policy, and for a fleet's portfolios."""
    _summaries: dict[DeadlineRule, Summary] = field(default_factory=dict, repr=False)

    @property
    def gpu_s(self) -> float:
        """Return the GPU seconds that a fleet took; NaN if it was none."""
        return sum(lease.gpu_s for lease in self.leases) if self.leases else math.nan

    def summary(self, rule: DeadlineRule) -> Summary:
        """Summarize the records once for each rule; some million tokens take a second."""
        if rule not in self._summaries:
            self._summaries[rule] = summarize(self.records, rule)
        return self._summaries[rule]


@dataclass(frozen=True)
class Comparison:
    """The outcomes of all contenders, and what kept others from having one."""

    outcomes: dict[str, Outcome]
    failed: dict[str, Exception]
    stopped: bool = False
    """Whether Ctrl-C ended the comparison before all contenders were done."""

    @property
    def is_whole(self) -> bool:
        """Tell whether every contender has an outcome."""
        return not (self.failed or self.stopped)

    def complete(self) -> dict[str, Outcome]:
        """Return the outcomes.  Raises what kept a contender from having one."""
        for error in self.failed.values():
            raise error
        if self.stopped:
            raise KeyboardInterrupt
        return self.outcomes


def summarize_all(outcomes: Mapping[str, Outcome], rule: DeadlineRule) -> dict[str, Summary]:
    """Summarize each outcome under `rule`."""
    return {name: outcome.summary(rule) for name, outcome in outcomes.items()}


def all_gpu_s(outcomes: Mapping[str, Outcome]) -> dict[str, float]:
    """Return the GPU seconds of each outcome that is of a fleet."""
    return {name: outcome.gpu_s for name, outcome in outcomes.items() if outcome.leases}


def compare(
    trace: Trace,
    contenders: Mapping[str, tuple[Policy, Replica]],
    on_progress: OnProgress = lambda _name, _num_ended: None,
) -> Comparison:
    """Replay `trace` under each contender's policy on its replica.

    A policy that fails, or Ctrl-C, leaves the outcomes of the others.  Raises the first error, or
    KeyboardInterrupt, if there is no outcome at all.
    """
    done = Comparison({}, {})
    for name, (policy, replica) in contenders.items():
        try:
            done.outcomes[name] = _replayed(trace, name, policy, replica, on_progress)
        except KeyboardInterrupt:
            if not done.outcomes:
                raise
            return replace(done, stopped=True)
        except Exception as error:  # a policy's own; the outcomes of the others are worth having
            done.failed[name] = error
    if not done.outcomes:
        raise next(iter(done.failed.values()))
    return done


def kv_capacity_tokens(model: FittedModel) -> int:
    """Return how many tokens the measured device's KV cache held, or a default if it is unknown."""
    return int(model.provenance.get("kv_capacity_tokens", _DEFAULT_KV_TOKENS))


def _replayed(
    trace: Trace, name: str, policy: Policy, replica: Replica, on_progress: OnProgress
) -> Outcome:
    steps: list[StepRow] = []

    def on_row(row: StepRow, ended: Sequence[Request]) -> None:
        if replica.fleet is None:
            steps.append(row)
        if ended:
            on_progress(name, len(ended))

    on_progress(name, 0)
    leases: list[Lease] = []
    if replica.fleet is None:
        requests = simulate(trace, policy, replica.model, replica.config, on_row=on_row)
    else:
        seed = replica.config.seed
        requests = replica.fleet.simulate(trace, policy, seed, on_row, leases.append)
    records = records_of(requests, replica.config.limits.deadline_rule)
    portfolio = portfolio_in(policy) if replica.fleet is None else None
    evaluations = None if portfolio is None else tuple(portfolio.evaluations)
    return Outcome(records, steps, leases, evaluations)


def _limits(limits: Limits) -> dict[str, object]:
    names = ("max_num_batched_tokens", "max_num_seqs", "preemption_mode", "deadline_rule")
    found = {name: getattr(limits, name) for name in names}
    # Only where they are set, so that results stored before they existed stay valid.
    rare = ("max_loras", "max_chunk_tokens", "num_watermark_blocks")
    return found | {name: value for name in rare if (value := getattr(limits, name))}
