"""Notes on options that change nothing on the given trace, before the work where that shows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from rich.markup import escape

from slosched.cli.console import console
from slosched.core import Policy, PreemptionMode
from slosched.evaluate.comparison import Outcome, Replica
from slosched.fleet.scaling import Lease
from slosched.fleet.setup import FleetSetup
from slosched.fleet.simulate import Failure
from slosched.kv import PrefixCaching
from slosched.perfmodel import FittedModel, swap_cost
from slosched.policy.spec import heeded_fields
from slosched.simulator.simulate import SimulationConfig
from slosched.workload import Trace

_MENDED_BY = {
    "priority": "--priority 0.2:-1 gives a fifth of them another",
    "lora_id": "--loras 8 gives each one of eight",
    "tenant": "a column `tenant` in the trace names them",
}
"""The option that gives the requests different values of a field, by field."""


def note_inert(trace: Trace, policies: Mapping[str, Policy], replicas: Iterable[Replica]) -> None:
    """Print a note for every option of policies and replicas that changes nothing on `trace`.

    And what copies between device and host cost, if any are asked for.
    """
    notes: list[str] = []
    for replica in replicas:
        notes += _of_replica(trace, replica.config)
        notes += _of_copies(replica.model, replica.config)
    for note in dict.fromkeys((*notes, *_of_policies(trace, policies))):
        console.print(f"[yellow]note:[/] {escape(note)}")


def note_late_failures(trace: Trace, replicas: Iterable[Replica]) -> None:
    """Print a note for every failure of a replica after the last arrival of `trace`."""
    if trace.is_closed_loop:
        return  # arrivals depend on how fast answers come
    fleets = [replica.fleet for replica in replicas if isinstance(replica.fleet, FleetSetup)]
    failures = {failure for fleet in fleets for failure in fleet.config.failures}
    for failure in sorted(failures):
        if failure.at_s > trace.duration_s:
            console.print(
                f"[yellow]note:[/] replica {failure.index} fails at {failure.at_s:g} s, when all "
                f"requests have arrived (the last one at {trace.duration_s:.3g} s): let it fail "
                "sooner, or play more requests (-n)"
            )


def note_idle_failures(
    trace: Trace, contenders: Mapping[str, tuple[Policy, Replica]], outcomes: Mapping[str, Outcome]
) -> None:
    """Print a note for every failure at a time when nothing ran on the replica's place.

    Only a replay shows that, since a scaler decides which places have a replica.
    """
    for name, outcome in outcomes.items():
        fleet = contenders[name][1].fleet
        failures = fleet.config.failures if isinstance(fleet, FleetSetup) else ()
        for failure in sorted(failures):
            is_noted = failure.at_s > trace.duration_s and not trace.is_closed_loop
            if not is_noted and not any(_hits(failure, lease) for lease in outcome.leases):
                console.print(
                    f"[yellow]note:[/] {escape(name)}: nothing fails at {failure.at_s:g} s, when "
                    f"no replica runs on place {failure.index}: name a lower one, or another time"
                )


def _hits(failure: Failure, lease: Lease) -> bool:
    """Tell whether the replica ran until a failure, or longer; all leases have ended."""
    assert lease.until_s is not None
    return failure.index == lease.index and lease.ready_s <= failure.at_s <= lease.until_s


def _of_replica(trace: Trace, config: SimulationConfig) -> Iterator[str]:
    if config.prefix_cache is not PrefixCaching.OFF and trace.prefix_block_tokens is None:
        yield f"{trace.name} says nothing of shared prefixes: the prefix cache finds none"
    if config.prefix_cache is not PrefixCaching.OFF and config.window_tokens is not None:
        yield (
            "--sliding-window changes nothing: with a prefix cache requests keep all their KV "
            "blocks, which others may share"
        )
    most, needed = config.limits.max_loras, len({r.lora_id for r in trace.requests} - {None})
    if most is not None and needed <= most:
        has = f"the requests of {trace.name} need {needed or 'no'} LoRA adapters in all"
        yield f"--max-loras {most} changes nothing: {has}; --loras {2 * most} gives it more"


def _of_copies(model: FittedModel, config: SimulationConfig) -> Iterator[str]:
    swaps = config.limits.preemption_mode is PreemptionMode.SWAP
    if swaps and not config.num_host_blocks:
        yield (
            "--preemption swap changes nothing: there is no host memory to swap to; "
            "--host-kv-tokens 100000 gives some"
        )
    elif swaps or config.prefix_host.num_blocks:
        free = "" if model.swapped_block_s else "; --swap-bandwidth 25, in GB/s, gives it a cost"
        yield f"{swap_cost(model)}{free}"


def _of_policies(trace: Trace, policies: Mapping[str, Policy]) -> Iterator[str]:
    for name, policy in policies.items():
        for field, option in heeded_fields(policy).items():
            if len({getattr(request, field) for request in trace.requests}) == 1:
                yield (
                    f"{name}: {option} has nothing to go by, as all requests of {trace.name} have "
                    f"the same {field}; {_MENDED_BY[field]}"
                )
