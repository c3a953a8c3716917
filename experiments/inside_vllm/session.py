"""Setups played from end to end: tuned, run, simulated; each heat is stored when it ends."""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from experiments.inside_vllm.device import is_measured, measure
from experiments.inside_vllm.heats import Heat, Row, heats_to_run, heats_to_tune, run
from experiments.inside_vllm.predict import (
    Stretch,
    fitted,
    num_steps,
    predicted,
    with_server_time,
)
from experiments.inside_vllm.results import PREDICTIONS, RUNS, TUNING, Book
from experiments.inside_vllm.server import Server, started
from experiments.inside_vllm.setups import Setup, System
from slosched.cli.console import console, progress_bar
from slosched.evaluate.capacity.code import tree_digest
from slosched.perfmodel import FittedModel, load_model, save_model
from slosched.perfmodel.device import cpu_name

_START_S = 60.0
"""The estimated time until the servers of a table are up, on an idle machine."""
_TAIL_S = 8.0
"""The estimated time of the last answers of a heat, in the device's time."""


@dataclass(frozen=True)
class Session:
    """The book for the rows, the folder for recordings, and the limit of time."""

    book: Book = field(default_factory=Book)
    folder: Path = Path("runs/inside_vllm")
    """The folder for logs and for the steps that servers record."""
    until_s: float = float("inf")
    """The time after which no heat begins, of `time.monotonic`."""

    @property
    def is_over(self) -> bool:
        return time.monotonic() > self.until_s

    def tune(self, setup: Setup, num_parts: int | None = None) -> None:
        """Play other parts of the trace than `run` does to vLLM with every budget."""
        left = self.missing(TUNING, heats_to_tune(setup, num_parts))
        self._play(TUNING, setup, setup.untuned, left)

    def run(self, setup: Setup, num_parts: int | None = None) -> None:
        """Play the trace to vLLM's own scheduler, at its best, and to slosched's policies."""
        left = self.missing(RUNS, heats_to_run(setup, num_parts))
        if left and not self.is_over:
            systems = setup.systems(self.book.best_budget(setup.name))
            self._play(RUNS, setup, systems, left)

    def simulate(self, setup: Setup, *, refit: bool) -> None:
        """Predict every run that was measured; `refit` the latency model to recorded steps."""
        runs = self.book.valid(RUNS)
        rows = runs[runs["setup"] == setup.name].to_dict("records")
        if not rows:
            console.print(f"{setup.name}: nothing was measured that could be predicted")
            return
        path = self.book.folder / f"{setup.name}.json"
        if refit:
            fit = fitted([self._stretch(setup, row) for row in rows if _policy_of(row)])
            save_model(fit.model, path)
            error = fit.held_out
            console.print(f"wrote {path}: held-out error {error.mape:.1f} % on average")
        device = load_model(path)
        lowest = min(row["rate"] for row in rows)
        calm = [row for row in rows if row["rate"] == lowest]
        with console.status(f"{setup.name}: learning what the server adds"):
            device = with_server_time(
                device, setup, calm, lambda d: [_guess(setup, row, d) for row in calm]
            )
        save_model(device, path)
        console.print(f"{path}: the server adds {device.server_time}")
        with progress_bar() as progress:
            for row in progress.track(rows, description=f"simulating {setup.name}"):
                self.book.keep(PREDICTIONS, [_guess(setup, row, device)])

    def missing(self, table: str, chosen: Sequence[Heat]) -> list[Heat]:
        """Return the heats that have not been measured, or only while the machine was too busy."""
        return [
            heat
            for heat in chosen
            if not self.book.has(table, heat.setup.name, heat.rate, heat.window)
        ]

    def _play(
        self, table: str, setup: Setup, systems: Sequence[System], heats: Sequence[Heat]
    ) -> None:
        if not heats or self.is_over:
            return
        if not is_measured(setup):
            with console.status(f"measuring the device of {setup.name}: some minutes"):
                measure(setup, self.folder)
        with ExitStack() as stack:
            with console.status(f"starting {len(systems)} servers of {setup.name}"):
                servers = stack.enter_context(self._served(setup, systems))
            self._measure(table, heats, servers)

    def _measure(self, table: str, heats: Sequence[Heat], servers: Mapping[System, Server]) -> None:
        facts = {"machine": cpu_name(), "code_digest": tree_digest()[:16]}
        context = get_context("spawn")
        with ProcessPoolExecutor(len(servers), context) as clients, progress_bar() as progress:
            for heat in progress.track(heats, description=f"{heats[0].setup.name}, {table}"):
                if self.is_over:
                    console.print("the time is up: the same command goes on from here")
                    return
                rows = [row | facts for row in self._rows(heat, servers, clients)]
                self.book.keep_heat(table, rows)
                for row in rows:
                    console.print(
                        f"{heat.setup.name} at {heat.rate:g}/s, part {heat.window}: "
                        f"{row['system']} {row['attainment']:.1%} in time, sent "
                        f"{row['max_lateness_s']} s late at most"
                    )

    def _rows(
        self, heat: Heat, servers: Mapping[System, Server], clients: ProcessPoolExecutor
    ) -> list[Row]:
        """Return the rows of one heat, with their settings, date and range of recorded steps."""
        recordings = {s.name: self._steps(heat.setup, s) for s in servers}
        budgets = {s.name: s.max_num_batched_tokens for s in servers}
        made = datetime.now(UTC).isoformat(timespec="seconds")
        first = {name: num_steps(path) for name, path in recordings.items()}
        rows = run(heat, servers, clients)
        for row in rows:
            name = str(row["system"])
            row["max_num_batched_tokens"] = budgets[name]
            row["first_step"] = first[name]
            row["num_steps"] = num_steps(recordings[name]) - first[name]
            row |= {"slowdown": heat.setup.slowdown, "made": made}
        return rows

    @contextmanager
    def _served(self, setup: Setup, systems: Sequence[System]) -> Iterator[Mapping[System, Server]]:
        """Start all servers at once, yield them when all are up, and stop them at the end."""
        with ExitStack() as stack:
            servers = {}
            for system in systems:
                steps = self._steps(setup, system)
                launch = setup.launch(system, steps.absolute())
                servers[system] = stack.enter_context(started(launch, steps.with_suffix(".log")))
            for server in servers.values():
                server.await_up()
            yield servers

    def _stretch(self, setup: Setup, row: Mapping[Hashable, Any]) -> Stretch:
        """Return the recorded steps of a run."""
        system = System(setup.policy_budget, _policy_of(row))
        return Stretch(self._steps(setup, system), int(row["first_step"]), int(row["num_steps"]))

    def _steps(self, setup: Setup, system: System) -> Path:
        """Return the file in which the steps of a server are recorded."""
        return self.folder / f"{setup.name}-{system.name.replace(' ', '-')}.csv"


def _policy_of(row: Mapping[Hashable, Any]) -> str | None:
    """Return the policy of a row; None for vLLM's own scheduler."""
    name = str(row["system"])
    return None if name.startswith("vLLM ") else name


def _guess(setup: Setup, row: Mapping[Hashable, Any], device: FittedModel) -> Row:
    """Simulate a measured run."""
    system = System(int(row["max_num_batched_tokens"]), _policy_of(row))
    return predicted(Heat(setup, row["rate"], row["window"]), system, device)


def seconds_of(tuning: Sequence[Heat], runs: Sequence[Heat]) -> float:
    """Estimate the time of these heats of one setup, with the start of the servers."""
    total_s = _START_S * (bool(tuning) + bool(runs))
    for heats, is_tuning in ((tuning, True), (runs, False)):
        for heat in heats:
            setup = heat.setup
            in_turn = len(setup.untuned if is_tuning else setup.systems(0))
            each_s = setup.slowdown * (setup.num_requests / heat.rate + _TAIL_S)
            total_s += each_s * (1 if setup.is_emulated else in_turn)
    return total_s
