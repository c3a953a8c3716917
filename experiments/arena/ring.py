"""The place where a scenario is played: one pool of workers and one store for all its stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from types import TracebackType
from typing import Any, Self

from experiments.arena.contenders import Entry
from experiments.arena.scenarios import Scale, Scenario
from slosched.evaluate.capacity import Bench, Contender, Plan, Store, Sweep, local_pool
from slosched.evaluate.capacity.pool import give
from slosched.perfmodel import FittedModel
from slosched.simulator.simulate import SimulationConfig
from slosched.workload import Trace

OnReplay = Callable[[], None]


@dataclass
class Ring:
    """A scenario at a scale, ready to be played.  It is a context, whose end stops the workers."""

    scenario: Scenario
    scale: Scale
    store: Store
    jobs: int | None = None
    on_replay: OnReplay = lambda: None
    num_replays: int = field(default=0, init=False)
    """Replays that were run, not found in the store."""

    def __enter__(self) -> Self:
        every = [
            *self.tuning_windows,
            *self.windows,
            *self.overload_windows,
            *self.bound_windows,
        ]
        bench = Bench.of(every, [self.model])
        self._executor = local_pool(self.jobs)(partial(give, bench))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._executor.shutdown(wait=True, cancel_futures=True)

    @cached_property
    def model(self) -> FittedModel:
        return self.scenario.device()

    @cached_property
    def config(self) -> SimulationConfig:
        return self.scenario.config(self.model)

    @cached_property
    def tuning_windows(self) -> list[Trace]:
        return self.scenario.tuning_windows(self.scale)

    @cached_property
    def windows(self) -> list[Trace]:
        return self.scenario.windows(self.scale)

    @cached_property
    def overload_windows(self) -> list[Trace]:
        return self.scenario.overload_windows(self.scale)

    @cached_property
    def bound_windows(self) -> list[Trace]:
        return self.scenario.bound_windows(self.scale)

    def contender(self, entry: Entry, config: SimulationConfig | None = None) -> Contender:
        """Return a policy as a contender, before it is tuned."""
        return Contender(
            entry.name, entry.policy, self.model, self.scenario.model, config or self.config
        )

    def sweep(self, contenders: Sequence[Contender], windows: Sequence[Trace], plan: Plan) -> Sweep:
        """Make a sweep and run it to its end."""
        sweep = Sweep(contenders, windows, plan, self.store)
        sweep.run(self.make_pool)
        return sweep

    def make_pool(self, _initialize: Callable[[], None]) -> Executor:
        """Return a pool of the ring's own workers, which have all traces and models and stay alive.

        A new pool for each of some hundred sweeps would spend more time on starting than on
        playing.
        """
        return _Borrowed(self._executor, self._count)

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        return self._executor.submit(function, *arguments)

    def _count(self) -> None:
        self.num_replays += 1
        self.on_replay()


class _Borrowed(Executor):
    def __init__(self, executor: Executor, on_done: OnReplay) -> None:
        self._executor, self._on_done = executor, on_done

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = self._executor.submit(fn, *args, **kwargs)
        future.add_done_callback(lambda _: self._on_done())
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Do nothing, since the ring stops its workers itself."""


def undisturbed(config: SimulationConfig) -> SimulationConfig:
    """Return the replica whose steps take the predicted time, for which the bounds hold."""
    return replace(config, disturbances=type(config.disturbances)())
