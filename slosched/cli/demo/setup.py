"""What the demo compares, on which replica, and the files that it leaves."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from slosched.core import DeadlineRule, Limits, SloschedError
from slosched.simulator.simulate import SimulationConfig

RULE = DeadlineRule.MEAN_TPOT
OURS = ("slo_aware", "goodput")
SPECS = {
    "fcfs": "fcfs:drop=infeasible",
    "edf": "edf:drop=infeasible",
    "vllm_v1": "vllm_v1",
    "slo_aware": "slo_aware:margin=0.1",
    "goodput": "goodput:margin=0.1",
}
"""The policies that are compared, with the options that a user would choose.

All that can drop requests do so, because otherwise the comparison would only show what dropping
gains. The margin leaves room for steps that take longer than predicted on a busy machine.
"""
LABELS = {name: f"{name}, {'without' if name == 'vllm_v1' else 'with'} dropping" for name in SPECS}
BASELINE = "fcfs"
"""The policy whose capacity determines the offered rate."""
LIVE = (BASELINE, *OURS)
LIMITS = Limits(max_num_batched_tokens=256, max_num_seqs=16, deadline_rule=RULE)
KV_TOKENS, HOST_KV_TOKENS, BLOCK_SIZE = 16_384, 4_096, 16
MAX_CONTEXT_TOKENS = 1024
REPLICA = SimulationConfig(
    limits=LIMITS,
    num_blocks=KV_TOKENS // BLOCK_SIZE,
    block_size=BLOCK_SIZE,
    num_host_blocks=HOST_KV_TOKENS // BLOCK_SIZE,
)
LENGTH_SCALE = 0.125
OVERLOAD = 1.5
"""The offered load, as a multiple of the rate at which the baseline meets 90 % of the SLOs."""
TARGET = 0.9


class DemoError(SloschedError):
    """A step of the demo failed."""


def quoted(word: Path | str) -> str:
    """Return the path or the name as one word of a command, even if it has blanks."""
    return shlex.quote(str(word))


@dataclass(frozen=True)
class Files:
    """The files that the demo writes to its folder."""

    folder: Path

    @property
    def profile(self) -> Path:
        return self.folder / "profile.csv"

    @property
    def model(self) -> Path:
        return self.folder / "model.json"

    @property
    def model_now(self) -> Path:
        return self.folder / "model-now.json"

    @property
    def fit_plot(self) -> Path:
        return self.folder / "fit.png"

    @property
    def trace(self) -> Path:
        return self.folder / "trace.csv"

    @property
    def report(self) -> Path:
        return self.folder / "report.html"

    @property
    def agreement(self) -> Path:
        return self.folder / "agreement.csv"

    def live(self, policy: str) -> Path:
        return self.folder / f"live-{policy}"

    def steps(self, policy: str) -> Path:
        return self.folder / f"steps-{policy}.csv"

    def server_log(self, policy: str) -> Path:
        return self.live(policy).with_suffix(".log")
