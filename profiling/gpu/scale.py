"""The size of a run: that of a GPU, or that of a rehearsal on a CPU, which takes seconds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import NamedTuple

from slosched.cli.local_model import LocalModel, open_local
from slosched.cli.options import Format, KVOptions, ModelOptions
from slosched.core import SLO, Limits
from slosched.workload import Trace, synthesize

HERE = Path(__file__).parent
POLICIES = ("fcfs", "sarathi", "goodput")


class Replay(NamedTuple):
    """A replay: a kind of trace at a rate in requests/s, under a policy."""

    trace: str
    rate: float
    policy: str


@dataclass(frozen=True)
class Scale:
    """The model, the limits, and how much is measured."""

    model: ModelOptions
    limits: Limits
    kv_tokens: int | None
    """Tokens that the KV cache holds; None for what memory allows."""
    backends: tuple[str, ...] | None
    """The attention backends to measure; None for all that run."""
    mixes: tuple[str, ...] | None
    """The shapes on which backends are compared with the definition of attention; None for all."""
    max_context_tokens: int
    num_batches: int
    max_passes: int
    time_limit_s: float
    """The most seconds that a stage measures."""
    swap_blocks: tuple[int, ...]
    """Numbers of KV blocks in one copy."""
    peak_size: int
    """Rows of the square matrices with which the device's peaks are measured."""
    roofline_contexts: tuple[int, ...]
    """Contexts of the decodes whose times are compared with the roofline."""
    roofline_decodes: tuple[int, ...]
    roofline_chunks: tuple[int, ...]
    rates: dict[str, tuple[float, ...]]
    """Requests/s by kind of trace."""
    duration_s: float
    """Seconds in which requests arrive."""
    length_factor: float
    """The factor of the lengths of the trace's requests."""
    slo: SLO
    timeout_s: float
    """The time after which a client disconnects, which bounds the length of a replay."""

    def open(self, attention: str, block_size: int, graph_sizes: str | None = None) -> LocalModel:
        """Load the model with random weights, and as large a swap space as the copies need.

        `graph_sizes` are those of the scale if none are given.
        """
        options = replace(
            self.model, attention=attention, graph_sizes=graph_sizes or self.model.graph_sizes
        )
        host_tokens = max(self.swap_blocks) * block_size
        return open_local(options, KVOptions(self.kv_tokens, host_tokens, block_size), self.limits)

    def replays(self) -> list[Replay]:
        """Return all replays, those of one trace one after the other."""
        return [
            Replay(trace, rate, policy)
            for trace, rates in self.rates.items()
            for rate, policy in product(rates, POLICIES)
        ]

    def trace(self, replay: Replay) -> Trace:
        """Return the trace of a replay, made up with the statistics of Azure's trace."""
        made_up = synthesize(replay.trace, duration_s=self.duration_s, rate=replay.rate, seed=0)
        scaled = made_up.with_lengths_scaled(self.length_factor).with_slo(self.slo)
        return scaled.clipped(self.max_context_tokens // 2, self.max_context_tokens // 2).trace


ON_GPU = Scale(
    model=ModelOptions(str(HERE / "llama-3.1-8b"), "cuda", "bfloat16", Format.DUMMY),
    limits=Limits(max_num_batched_tokens=2048, max_num_seqs=256),
    kv_tokens=None,
    backends=None,
    mixes=None,
    max_context_tokens=16384,
    num_batches=120,
    max_passes=7,
    time_limit_s=240.0,
    swap_blocks=(1, 4, 16, 64, 256),
    peak_size=8192,
    roofline_contexts=(256, 1024, 4096),
    roofline_decodes=(1, 8, 32, 64, 128, 256),
    roofline_chunks=(128, 512, 2048),
    rates={"azure_conv": (6.0, 12.0, 24.0), "azure_code": (4.0, 8.0, 16.0)},
    duration_s=15.0,
    length_factor=1.0,
    slo=SLO(ttft_s=1.0, tpot_s=0.05),
    timeout_s=10.0,
)
REHEARSAL = Scale(
    model=ModelOptions("tiny-random", "cpu", "float32", threads=1, graph_sizes="1,8,16"),
    limits=Limits(max_num_batched_tokens=128, max_num_seqs=16),
    kv_tokens=8192,
    backends=("sdpa",),
    mixes=("decodes", "a late chunk"),
    max_context_tokens=256,
    num_batches=24,
    max_passes=1,
    time_limit_s=2.0,
    swap_blocks=(1, 4, 16),
    peak_size=128,
    roofline_contexts=(64,),
    roofline_decodes=(1, 8),
    roofline_chunks=(64,),
    rates={"azure_conv": (20.0,), "azure_code": (20.0,)},
    duration_s=0.2,
    length_factor=0.02,
    slo=SLO(ttft_s=0.1, tpot_s=0.02),
    timeout_s=0.5,
)
