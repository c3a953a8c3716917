"""Engines as they ship, on the command line: `-p like:vllm`, and `--like vllm` for all policies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, TypeVar

import typer

from slosched.cli import options
from slosched.cli.console import console
from slosched.cli.fleet import FleetOptions
from slosched.cli.simulation import ReplicaOptions
from slosched.core import Policy
from slosched.evaluate.as_shipped import ENGINES, AsShipped, as_shipped
from slosched.evaluate.comparison import Replica, kv_capacity_tokens
from slosched.kv import PrefixCaching
from slosched.perfmodel import DEFAULT_MODEL, load_model
from slosched.policy.spec import make_policy
from slosched.simulator.simulate import SimulationConfig
from slosched.spelling import meant

_Group = TypeVar("_Group", options.LimitOptions, options.KVOptions, ReplicaOptions)

_PREFIX = "like:"
"""The begin of a contender's name that stands for an engine as it ships."""


def _engine(text: str) -> str:
    """Return the name of an engine; raise BadParameter for any other text."""
    if text not in ENGINES:
        raise typer.BadParameter(
            f"no engine {text!r}{meant(text, ENGINES)}; there are {', '.join(ENGINES)}"
        )
    return text


Like = Annotated[
    str | None,
    typer.Option(
        parser=_engine,
        metavar="ENGINE",
        help=f"Simulate an engine as it ships: {', '.join(ENGINES)}.  Its own scheduler runs "
        "under the limits, KV cache, prefix cache and overlap that it chooses on this GPU, and "
        "so do the policies of -p.  What you give yourself comes first.",
    ),
]


@dataclass(frozen=True)
class Entrant:
    """A policy that takes part, on its replica."""

    name: str
    spec: str
    """The policy's spec, as `make_policy` reads it."""
    replica: Replica
    engine: AsShipped | None = None
    """The engine whose settings the replica has, if any."""

    @property
    def policy(self) -> Policy:
        return make_policy(self.spec)


@dataclass(frozen=True)
class Entry:
    """The options from which the entrants of a command get their replicas."""

    context: typer.Context
    limits: options.LimitOptions
    kv: options.KVOptions
    replica: ReplicaOptions
    fleet: FleetOptions
    seed: int

    def device(self, like: str | None) -> Replica:
        """Return the replica of all entrants that bring no settings of their own."""
        if like is None:
            return self._open(self.limits, self.kv, self.replica)
        return self._open_like(self._shipped(like))

    def entrants(
        self, specs: Iterable[str], device: Replica, like: str | None = None
    ) -> list[Entrant]:
        """Return an entrant for each different spec; `like:vllm` is vLLM as it ships.

        The others run on `device`.  It has the settings of the engine `like`, if one is named, and
        then that engine itself comes first.  Each spec is played on each variant of a fleet.
        Raises PolicySpecError or UnknownEngineError before anything is run.
        """
        settings = None if like is None else self._shipped(like)
        first = [] if like is None else [_PREFIX + like]
        found = []
        for spec in dict.fromkeys((*first, *specs)):
            entrant = Entrant(spec, spec, device, settings)
            if spec.startswith(_PREFIX):
                engine = self._shipped(spec.removeprefix(_PREFIX))
                replica = device if spec == f"{_PREFIX}{like}" else self._open_like(engine)
                entrant = Entrant(spec, engine.policy, replica, engine)
            make_policy(entrant.spec)
            found += self._on_fleets(entrant)
        return found

    def _on_fleets(self, entrant: Entrant) -> list[Entrant]:
        """Return the entrant on each variant of its fleet; itself if it has none."""
        fleet = entrant.replica.fleet
        if fleet is None:
            return [entrant]
        return [
            replace(
                entrant, name=entrant.name + suffix, replica=replace(entrant.replica, fleet=variant)
            )
            for suffix, variant in self.fleet.variants(fleet).items()
        ]

    def _open(
        self, limits: options.LimitOptions, kv: options.KVOptions, options_of_one: ReplicaOptions
    ) -> Replica:
        """Return the replica, or the first one of the fleet."""

        def open_one(model_name: str | None) -> Replica:
            one = options_of_one
            if model_name is not None:
                one = replace(one, latency_model=model_name)
            return one.open(limits.limits(), kv, self.seed)

        return self.fleet.open(open_one)

    def _shipped(self, engine: str) -> AsShipped:
        model = load_model(self.replica.latency_model or DEFAULT_MODEL)
        return as_shipped(engine, model, kv_capacity_tokens(model))

    def _open_like(self, engine: AsShipped) -> Replica:
        limits = self._filled(self.limits, engine, "max_num_batched_tokens", "max_num_seqs")
        kv = self._filled(self.kv, engine, "block_size", "kv_tokens")
        replica = self._filled(self.replica, engine, "prefix_cache", "overlap")
        return self._open(limits, kv, replica)

    def _filled(self, group: _Group, engine: AsShipped, *names: str) -> _Group:
        """Return the options with the engine's values for those that the user did not give."""
        left = [name for name in names if not options.is_given(self.context, name)]
        return replace(group, **{name: getattr(engine, name) for name in left})


def common_replica(entrants: Sequence[Entrant], device: Replica) -> Replica:
    """Return `device`, or the first entrant's replica if all bring settings of their own."""
    is_used = any(entrant.replica is device for entrant in entrants)
    return device if is_used else entrants[0].replica


def settings_of(entrants: Sequence[Entrant]) -> dict[str, str]:
    """Return in words under which settings each engine is simulated, for the console and results.

    Where several entrants have the settings of an engine, the first one's policy is named.
    """
    found: dict[str, str] = {}
    for entrant in entrants:
        if entrant.engine is not None:
            name = f"like {entrant.engine.engine}"
            found.setdefault(name, _settings(entrant.spec, entrant.engine, entrant.replica.config))
    return found


def note_settings(settings: dict[str, str]) -> None:
    """Print the settings of each engine in a line."""
    for name, text in settings.items():
        console.print(f"{name}: {text}", markup=False, highlight=False, soft_wrap=True)


def _settings(spec: str, engine: AsShipped, config: SimulationConfig) -> str:
    limits, prefixes = config.limits, config.prefix_cache
    is_engines = config.num_blocks == engine.kv_tokens // config.block_size
    return ", ".join(
        (
            spec,
            f"{limits.max_num_batched_tokens} tokens",
            f"{limits.max_num_seqs} requests",
            "overlap" if config.overlap else "no overlap",
            f"prefix cache {prefixes}" if prefixes is not PrefixCaching.OFF else "no prefix cache",
            f"block {config.block_size}",
            f"KV cache {config.kv_tokens} tokens ({engine.kv_memory if is_engines else 'given'})",
        )
    )
