"""An emulated device that is served, the conversations for it, and the rate that it can keep."""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments.quotes.replica import Cell
from slosched.core import DeadlineRule, Limits
from slosched.evaluate.capacity import Contender, Plan, Study, Sweep, local_pool
from slosched.metrics import RequestRecord, is_good
from slosched.perfmodel import FittedModel, save_model, scaled
from slosched.policy.spec import make_policy
from slosched.simulator.simulate import simulate
from slosched.workload import Proportional, Trace, read_trace, synthesize
from soak.program import program

_CONVERSATIONS = Path(__file__).parents[3] / "shared" / "traces" / "azure_conv_2023.csv"
DEFAULT = "goodput+door"
"""The policy of `slosched serve`."""
_IN_TIME = 0.99


@contextlib.contextmanager
def served(model: FittedModel, limits: Limits, policy: str) -> Iterator[str]:
    """Start a server that emulates a device with these limits; yield its URL."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.json"
        save_model(model, path)
        arguments = (
            *("--emulate", str(path), "-p", policy),
            *("--max-num-batched-tokens", str(limits.max_num_batched_tokens)),
            *("--max-num-seqs", str(limits.max_num_seqs)),
            *("--no-log-requests", "--log-interval", "off"),
        )
        with program(arguments) as server:
            yield server.url


@dataclass(frozen=True)
class Stage:
    """A device with Azure's conversations, from `../shared` or, where that is absent, made up.

    In slow motion the device, the arrivals and the promises are all slower by the same factor.  On
    a machine that does other work, too, what that takes is a smaller share of each step then.
    """

    cell: Cell
    model: FittedModel
    slowdown: float
    conversations: Trace
    capacity: float
    """The highest rate of which 99 % are in time in the simulator: a load of 1."""

    @classmethod
    def on(cls, device: str, num_requests: int, slowdown: float) -> Stage:
        """Return the stage with the capacity that the simulator finds."""
        cell = Cell(device, "azure_conv", 1.0)
        model = scaled(cell.model, slowdown)
        if _CONVERSATIONS.exists():
            trace = read_trace(_CONVERSATIONS, num_requests=num_requests)
        else:
            trace = synthesize(cell.kind, num_requests=num_requests, rate=1.0, seed=7)
        tpot_s, ttft_s = slowdown * cell.tpot_s, slowdown * cell.ttft_s
        trace = trace.with_slo(Proportional(model.predict_prefill, 2.0, tpot_s, ttft_s))
        contender = Contender(DEFAULT, DEFAULT, model, str(cell), cell.config)
        sweep = Sweep([contender], [trace], Plan((_IN_TIME,)))
        sweep.run(local_pool(1))
        study = Study(list(sweep.measured.values()), [trace])
        capacity = study.capacity(DEFAULT, _IN_TIME).requests_per_s
        return cls(cell, model, slowdown, trace, capacity)

    def __str__(self) -> str:
        slow = "" if self.slowdown == 1 else f", {self.slowdown:g} times as slow"
        return f"{self.cell}{slow}; capacity {self.capacity:.2f}/s"

    def trace(self, load: float) -> Trace:
        """Return the conversations at a load."""
        return self.conversations.scaled_to(load * self.capacity)

    def simulated(self, trace: Trace, policy: str) -> list[RequestRecord]:
        """Return what the simulator makes of a trace."""
        requests = simulate(trace, make_policy(policy), self.model, self.cell.config)
        return [RequestRecord.from_request(request) for request in requests]

    @contextlib.contextmanager
    def served(self, policy: str) -> Iterator[str]:
        """Start a server that emulates the device; yield its URL."""
        with served(self.model, self.cell.config.limits, policy) as url:
            yield url


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose a stage."""
    parser.add_argument("--device", default="l40s", help="with llama-3.1-8b")
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--slowdown", type=float, default=1.0, help="for a busy machine: 4")
    parser.add_argument("--policy", default=DEFAULT)


def num_good(records: Sequence[RequestRecord]) -> int:
    return sum(is_good(record, DeadlineRule.MEAN_TPOT) for record in records)


def share_good(records: Sequence[RequestRecord]) -> float:
    return num_good(records) / len(records)
