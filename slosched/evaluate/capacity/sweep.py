"""Capacities of several contenders: their searches run side by side on one pool of workers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np

from slosched.core import BatchShape, LatencyModel
from slosched.evaluate.capacity.measured import Contender, Measured, Plan
from slosched.evaluate.capacity.outcomes import BoolArray, Outcomes
from slosched.evaluate.capacity.point import (
    Bench,
    CapacityError,
    Point,
    model_digest,
    trace_digest,
)
from slosched.evaluate.capacity.pool import MakePool, give, run_point
from slosched.evaluate.capacity.rates import Lattice
from slosched.evaluate.capacity.store import Store
from slosched.simulator.simulate import SimulationConfig
from slosched.workload.trace import Trace

_KNEE_OF_BUSY = 0.75
_LOWEST_OF_BUSY, _HIGHEST_OF_BUSY = 1 / 256, 16.0
"""The range of a search, as multiples of the rate that would just keep the device busy."""

OnProgress = Callable[[int, int], None]
"""A function that is called with the number of replays done and the expected total."""


class _Task(NamedTuple):
    measured: Measured
    place: int
    window: int
    point: Point


class Sweep:
    """The searches of all contenders.  `run` may be interrupted: a store keeps what is done.

    A contender's searches ask for replays in rounds, and what they ask next depends on the whole
    round.  So the results do not depend on which replay ends first, nor on interruptions.
    """

    def __init__(
        self,
        contenders: Sequence[Contender],
        windows: Sequence[Trace],
        plan: Plan | None = None,
        store: Store | None = None,
        judged: Sequence[BoolArray] | None = None,
    ) -> None:
        """Prepare the searches; at each rate a contender plays all windows, one seed each.

        `judged` marks the requests of each window that count; by default all do.  The others are
        served like any, but nobody is judged by them.  Raises ValueError if there is no contender
        or window, or if two contenders have one name.
        """
        if not contenders or not windows:
            raise ValueError("a sweep needs at least one contender and one window of a trace")
        names = [contender.name for contender in contenders]
        if len(set(names)) < len(names):
            raise ValueError(f"two contenders have the same name: {', '.join(names)}")
        plan = plan or Plan()
        self.windows = list(windows)
        self._store, self._judged = store, judged
        self._contenders = {contender.name: contender for contender in contenders}
        self._num_shared_rates, self._has_shared = plan.num_shared_rates, False
        self._bench = Bench.of(windows, [contender.model for contender in contenders])
        self._models = {c.name: model_digest(c.model) for c in contenders}
        self._traces = [trace_digest(window) for window in windows]
        busy = plan.at_rate
        if busy is None:
            busy = busy_rate(contenders[0], self.windows[0])
        highest = busy * _HIGHEST_OF_BUSY if plan.max_rate is None else plan.max_rate
        # The highest rate may be one that hardly keeps the device busy.
        lowest = plan.min_rate or min(busy * _LOWEST_OF_BUSY, highest / 2)
        lattice = Lattice.between(lowest, highest, plan.precision)
        if plan.at_rate is not None:
            lattice = lattice.only(plan.at_rate)
        guess = lattice.nearest(busy * _KNEE_OF_BUSY)
        self.measured = {
            c.name: Measured(c.name, plan, lattice, guess, len(windows)) for c in contenders
        }

    def run(self, make_pool: MakePool, on_progress: OnProgress | None = None) -> None:
        """Run until every search is over.  A contender that fails is given up, the others go on.

        Raises CapacityError if a worker process dies.
        """
        with make_pool(partial(give, self._bench)) as pool:
            try:
                self._run(pool, on_progress or (lambda _done, _expected: None))
            except BrokenProcessPool as error:
                raise CapacityError(
                    "a worker process died, out of memory perhaps: try fewer --jobs; what was "
                    "done is kept"
                ) from error
            finally:
                pool.shutdown(wait=True, cancel_futures=True)

    def _run(self, pool: Executor, on_progress: OnProgress) -> None:
        running: dict[Future[bytes], _Task] = {}
        while tasks := [*running.values(), *self._new_tasks(running.values())]:
            for task in tasks[len(running) :]:
                future = pool.submit(run_point, task.point)
                if future.done():  # the pool runs tasks as they are submitted
                    self._book(task, future)
                    on_progress(*self._progress())
                else:
                    running[future] = task
            on_progress(*self._progress())
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                self._book(running.pop(future), future)
        on_progress(*self._progress())

    def _share_rates(self) -> bool:
        """Choose rates for all contenders from the range of the searches, once these are over."""
        met = [k for measured in self.measured.values() for k in measured.complete]
        if not met or not self._num_shared_rates or self._has_shared:
            return False
        places = {round(k) for k in np.linspace(min(met), max(met), self._num_shared_rates)}
        for measured in self.measured.values():
            measured.shared = sorted(places)
        self._has_shared = True
        return True

    def _new_tasks(self, running: Collection[_Task]) -> list[_Task]:
        """Return the replays of each next round, as far as they are not in the store.

        A contender of which a replay is running has none.
        """
        busy = {task.measured.name for task in running}
        tasks = []
        for measured in self.measured.values():
            if measured.name not in busy:
                places = self._next_round(measured)
                tasks += [_Task(measured, k, i, self._point(measured, k, i)) for k, i in places]
        if not tasks and not running and self._share_rates():
            return self._new_tasks(running)
        return tasks

    def _next_round(self, measured: Measured) -> list[tuple[int, int]]:
        """Return the next places and windows to simulate; rounds that the store has are over."""
        while wanted := measured.wanted():
            missing = [place for place in wanted if not self._recall(measured, *place)]
            if missing:
                return missing
        return []

    def _recall(self, measured: Measured, place: int, window: int) -> bool:
        """Take a replay from the store and tell whether it was there."""
        kept = self._store.get(self._point(measured, place, window)) if self._store else None
        if kept is not None:
            self._take(measured, place, window, kept)
        return kept is not None

    def _point(self, measured: Measured, place: int, window: int) -> Point:
        contender = self._contenders[measured.name]
        return Point(
            policy=contender.policy,
            model=self._models[contender.name],
            trace=self._traces[window],
            rate=measured.lattice.rate(place),
            config=replace(contender.config, seed=contender.config.seed + window),
            fleet=contender.fleet,
        )

    def _book(self, task: _Task, future: Future[bytes]) -> None:
        measured, place, window, point = task
        error = future.exception()
        if isinstance(error, BrokenProcessPool) or not isinstance(error, Exception | None):
            raise error
        if error is not None:
            measured.error = measured.error or error
            return
        outcomes = Outcomes.unpack(future.result())
        self._take(measured, place, window, outcomes)
        if self._store is not None:
            names = {
                "trace": self.windows[window].name,
                "model": self._contenders[measured.name].model_name,
            }
            self._store.put(point, outcomes, names)

    def _take(self, measured: Measured, place: int, window: int, outcomes: Outcomes) -> None:
        """Keep what counts of a replay."""
        if self._judged is not None:
            outcomes = outcomes.among(self._judged[window])
        measured.outcomes.setdefault(place, {})[window] = outcomes

    def _progress(self) -> tuple[int, int]:
        done = sum(measured.num_done for measured in self.measured.values())
        return done, done + sum(measured.num_left() for measured in self.measured.values())


def busy_rate(contender: Contender, trace: Trace) -> float:
    """Estimate the requests/s that keep all replicas busy."""
    if contender.fleet is None:
        return busy_rate_of_one(contender.model, contender.config, trace)
    return sum(busy_rate_of_one(*replica, trace) for replica in contender.fleet.replicas)


def busy_rate_of_one(model: LatencyModel, config: SimulationConfig, trace: Trace) -> float:
    """Estimate the requests/s that keep the device busy with full steps of prompts and decodes."""
    limits = config.limits
    prompt, output = float(trace.prompt_tokens.mean()), float(trace.output_tokens.mean())
    step_tokens = limits.max_num_batched_tokens
    decodes = BatchShape()
    decodes.add_decodes([round(prompt + output / 2)] * min(limits.max_num_seqs, step_tokens))
    prompt_s = model.predict_prefill(step_tokens) / step_tokens * prompt
    return 1 / (prompt_s + model.predict(decodes) / decodes.num_decodes * output)
