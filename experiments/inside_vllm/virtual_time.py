"""Setups played to vLLM's engine core in virtual time, and samples of them in real time.

Each system plays each part in a process of its own, so a result depends on nothing that was played
before.  The processes are forked from one that has imported vLLM already.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from importlib.util import find_spec
from multiprocessing import get_context
from multiprocessing.pool import Pool

from experiments.inside_vllm.heats import Heat, Row, heats_to_run, heats_to_tune
from experiments.inside_vllm.predict import predicted
from experiments.inside_vllm.results import PREDICTIONS, RUNS, SAMPLE, SAMPLE_VIRTUAL, TUNING, Book
from experiments.inside_vllm.setups import RESULTS, Setup, System
from slosched.cli.console import progress_bar
from slosched.core import SloschedError
from slosched.evaluate.capacity.code import tree_digest
from slosched.perfmodel.device import cpu_name
from slosched.perfmodel.forms import described
from slosched.workload import Trace

VIRTUAL_RESULTS = RESULTS / "virtual_time"
_PLAYER = "experiments.inside_vllm.play_apart"


class NoVllmError(SloschedError):
    """vLLM is not installed for the Python that runs this."""


@dataclass(frozen=True)
class VirtualSession:
    """The book for the rows, and the number of processes that play."""

    book: Book = field(default_factory=lambda: Book(VIRTUAL_RESULTS))
    num_workers: int = field(default_factory=lambda: os.cpu_count() or 1)

    def tune(self, setup: Setup, num_parts: int | None = None) -> None:
        """Play other parts of the trace than `run` does to vLLM with every budget."""
        self._play(TUNING, setup.untuned, heats_to_tune(setup, num_parts))

    def run(self, setup: Setup, num_parts: int | None = None) -> None:
        """Play the trace to vLLM's own scheduler, at its best, and to all policies."""
        self._play(RUNS, self._systems(setup), heats_to_run(setup, num_parts))

    def sample(self, setup: Setup, num_parts: int, slowdown: float) -> None:
        """Play the first parts in slow motion, in real and in virtual time: vLLM's own and ours.

        The engine core and the client are the same in both.
        """
        slow = replace(setup, slowdown=slowdown, rivals=())
        systems, chosen = self._systems(slow), heats_to_run(slow, num_parts)
        self._play(SAMPLE, systems, chosen, is_virtual=False)
        self._play(SAMPLE_VIRTUAL, systems, chosen)

    def simulate(self, setup: Setup, rates: Sequence[float] = ()) -> None:
        """Predict every run that was played, at these rates alone if there are any.

        The emulated device takes exactly the times of its latency model, and no server adds to
        them, so nothing has to be fitted.
        """
        model = setup.model
        device = described(model, model.provenance, model.held_out_error, noise=0.0)
        played = self.book.of(RUNS, setup.name)
        if rates:
            played = played[played["rate"].isin(rates)]
        systems = [s for s in self._systems(setup) if s.name in set(played["system"])]
        with progress_bar() as progress:
            heats = played[["rate", "window"]].drop_duplicates().to_dict("records")
            for row in progress.track(heats, description=f"simulating {setup.name}"):
                heat = Heat(setup, row["rate"], row["window"])
                self.book.keep(PREDICTIONS, [predicted(heat, s, device) for s in systems])

    def _systems(self, setup: Setup) -> tuple[System, ...]:
        return setup.systems(self.book.best_budget(setup.name))

    def _play(
        self,
        table: str,
        systems: Sequence[System],
        chosen: Sequence[Heat],
        *,
        is_virtual: bool = True,
    ) -> None:
        """Play what has not been played; the rows of a heat are stored when all of them exist."""
        left = self.missing(table, chosen, systems)
        if not left:
            return
        setup = left[0][0].setup
        with workers(self.num_workers, setup) as pool, progress_bar() as progress:
            for heat, missing in progress.track(left, description=f"{setup.name}, {table}"):
                trace = heat.setup.load(heat.rate, heat.window)
                tasks = [(heat, system, trace, is_virtual) for system in missing]
                rows = pool.starmap(_play, tasks, chunksize=1)
                self.book.keep(table, [row | _facts() for row in rows])

    def missing(
        self, table: str, chosen: Sequence[Heat], systems: Sequence[System]
    ) -> list[tuple[Heat, list[System]]]:
        """Return the heats that some of the systems have not played, with these systems."""
        if not chosen:
            return []
        known = self.book.of(table, chosen[0].setup.name)
        played = {*zip(known["rate"], known["window"], known["system"], strict=True)}
        left = [
            (heat, [s for s in systems if (heat.rate, heat.window, s.name) not in played])
            for heat in chosen
        ]
        return [(heat, those) for heat, those in left if those]


@contextmanager
def workers(number: int, setup: Setup) -> Iterator[Pool]:
    """Yield a pool in which each task gets a new process, forked from one that knows vLLM."""
    if find_spec("vllm") is None:
        raise NoVllmError(
            "vLLM is not installed for this Python: make an environment that has it with `make "
            ".venv-vllm/.ready`, and run `.venv-vllm/bin/python -m experiments.inside_vllm ...`"
        )
    quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    os.environ.update({**quiet, **setup.environment})  # before vLLM is imported by the processes
    context = get_context("forkserver")
    context.set_forkserver_preload([_PLAYER])
    with context.Pool(number, maxtasksperchild=1) as pool:
        yield pool


def _facts() -> Row:
    return {
        "machine": cpu_name(),
        "code_digest": tree_digest()[:16],
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _play(heat: Heat, system: System, trace: Trace, is_virtual: bool) -> Row:
    """Play in this process, which has imported vLLM; the process that asks has not."""
    from experiments.inside_vllm.play_apart import play_apart

    return play_apart(heat, system, trace, is_virtual)
