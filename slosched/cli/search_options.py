"""Options of the commands that search: processes, tuned files, windows of a trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slosched.cli import options
from slosched.cli.console import console
from slosched.cli.trace_source import has_slos, is_kind, note_own_slos
from slosched.core import BatchShape, LatencyModel
from slosched.evaluate.comparison import Replica
from slosched.fleet.split_setup import AnyFleet
from slosched.fleet.view import ReplicaKind
from slosched.kv import PrefixCaching
from slosched.simulator.simulate import SimulationConfig
from slosched.workload import Trace

if TYPE_CHECKING:
    from slosched.evaluate.capacity import MakePool

_MADE_UP_FROM_THE_END = 1 << 20
"""Added to the size of a negative seed of a made-up trace, so that it differs from all others."""

Jobs = Annotated[
    int | None,
    typer.Option(
        "--jobs", "-j", min=1, help="Number of processes: 2.  Default: one for each core."
    ),
]
RayAddress = Annotated[
    str | None,
    typer.Option(metavar="ADDRESS", help="Run on a Ray cluster: auto, host:port, or local."),
]
Seeds = Annotated[
    int,
    typer.Option(
        min=1, help="Number of windows of the trace, or of made-up traces, with -n requests each."
    ),
]
TunedFiles = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="FILE",
        help="Add a tuned policy: the file runs/tune/tuned.json of `slosched tune`.  May be "
        "repeated.",
    ),
]
Precision = Annotated[
    float, typer.Option(help="How closely the search brackets the rate: 0.02 for 2 %.")
]


def check_no_tuned(files: Sequence[Path] | None, device: Replica) -> None:
    """Raise ValueError for tuned files with a fleet, whose replicas they do not describe."""
    if files and device.fleet is not None:
        raise ValueError(
            f"--tuned {files[0]} sets one replica's limits; leave out --replicas, or name the "
            "tuned policy with -p"
        )


def pool_of(jobs: int | None, ray: str | None) -> MakePool:
    """Return the pool that runs replays: this machine's cores, or the Ray cluster at `ray`."""
    if ray is None:
        from slosched.evaluate.capacity import local_pool

        return local_pool(jobs)
    if jobs is not None:
        raise ValueError("--jobs is for this machine; a Ray cluster knows its own cores")
    from slosched.integrations.ray import ray_pool

    return ray_pool(ray)


def windows_of(
    source: str,
    arrivals: options.TraceOptions,
    promise: options.TracePromiseOptions,
    model: LatencyModel | None,
    seeds: Sequence[int],
    default_size: int,
    *,
    keeps_slos: bool,
    takes_rate: bool = False,
) -> list[Trace]:
    """Return one trace for each seed: consecutive windows of a file, or made-up traces.

    Negative seeds count from the end of the file: -1 is its last window.  The model is needed only
    for promises in prefill times.  With `keeps_slos` a file that has SLOs of its own keeps them,
    and a note says so.  Unless it `takes_rate`, a rate is refused.  Raises TraceError for a
    window whose requests all arrive at one time, which cannot be played at a rate.
    """
    if arrivals.rate is not None and not takes_rate:
        raise ValueError(
            f"--rate {arrivals.rate:g}: the search chooses the rates; `capacity --max-rate` ends "
            "it, `tune --at-rate` is for one rate alone"
        )
    if is_kind(source):
        size = None if arrivals.duration else arrivals.num_requests or default_size
        made_up = replace(arrivals, num_requests=size)
        numbers = [s if s >= 0 else _MADE_UP_FROM_THE_END - s for s in seeds]
        made = [made_up.open(source, promise.rule(model, s), s) for s in numbers]
        for one in made:
            one.own_rate()
        return made
    unpromised = replace(arrivals, num_requests=None, slo_program=None)
    whole = unpromised.open(source, None, max(seeds[0], 0))
    whole.own_rate()  # larger windows would not help where there is none
    from slosched.evaluate.capacity import check_rate_of, window

    size = arrivals.num_requests or max(1, min(default_size, len(whole) // len(seeds)))
    if len(seeds) * size > len(whole):
        console.print(
            f"[yellow]note:[/] {len(seeds)} windows of {size} requests overlap, as {whole.name} "
            f"has {len(whole)}: intervals will be too narrow"
        )
    has_own = keeps_slos and has_slos(whole)
    if has_own:
        note_own_slos(whole)
    cut = []
    for seed in seeds:
        rule = None if has_own else promise.rule(model, abs(seed))
        part = window(whole, size, seed)
        check_rate_of(part, "give windows more requests with -n, or name another trace")
        cut.append(arrivals.promised(part, rule))
    return cut


def loosest_fleet(fleets: Sequence[AnyFleet]) -> AnyFleet:
    """Return the first fleet, of which each replica is the `loosest` one on its place."""
    places = zip(*(fleet.replicas for fleet in fleets), strict=True)
    return replace(fleets[0], replicas=tuple(map(loosest, places)))


def loosest(kinds: Sequence[ReplicaKind]) -> ReplicaKind:
    """Return a replica of the shortest steps and the loosest limits, whose bound is one for all.

    All have one device, and their steps differ in what a server adds to each of them: an engine
    that plans ahead hides the host's time, and another does not.
    """
    decode = BatchShape()
    decode.add(1, 1)
    fastest = min((kind.model for kind in kinds), key=lambda model: model.predict(decode))
    return ReplicaKind(fastest, _loosest_config([kind.config for kind in kinds]))


def _loosest_config(configs: Sequence[SimulationConfig]) -> SimulationConfig:
    """Return the first replica with the loosest limits and the largest KV cache of all.

    Those of tuned policies and of engines as they ship may differ.  It has a prefix cache if any of
    them has one.
    """
    every = [config.limits for config in configs]
    limits = replace(
        every[0],
        max_num_batched_tokens=max(one.max_num_batched_tokens for one in every),
        max_num_seqs=max(one.max_num_seqs for one in every),
    )
    largest = max(configs, key=lambda config: config.kv_tokens)
    caching = (c.prefix_cache for c in configs if c.prefix_cache is not PrefixCaching.OFF)
    return replace(
        configs[0],
        limits=limits,
        num_blocks=largest.num_blocks,
        block_size=largest.block_size,
        prefix_cache=next(caching, PrefixCaching.OFF),
    )
