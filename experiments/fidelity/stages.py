"""Stages of load that real vLLM servers were measured under, as a CSV of aggregates.

A run is one server under one or two stages of load.  Each stage is a row of `measured/h100.csv`:
what was sent and what the client saw.  `collect.py` made the file.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import groupby
from pathlib import Path
from typing import Any

import pandas as pd

MEASURED = Path(__file__).parent / "measured" / "h100.csv"
_WAITING_SHARE = 0.1


@dataclass(frozen=True)
class Stage:
    """One stage of load on a server: its settings, what was sent, and what the client measured.

    What was not published is NaN.
    """

    run: str
    model: str
    tensor_parallel: int
    workload: str
    max_num_batched_tokens: int
    max_num_seqs: int
    kv_blocks: float
    """KV blocks that vLLM reported."""
    stage: int
    rate_per_s: float
    duration_s: float
    system_prompt_tokens: int
    prompt_min_tokens: int
    prompt_max_tokens: int
    output_tokens: int
    num_succeeded: float
    num_failed: float
    e2e_mean_s: float
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p99_s: float

    @property
    def tpot_mean_s(self) -> float:
        """Return the time for each token after the first, from the means of both latencies."""
        return (self.e2e_mean_s - self.ttft_mean_s) / (self.output_tokens - 1)

    @property
    def is_saturated(self) -> bool:
        return is_saturated(self.ttft_mean_s, self.e2e_mean_s)

    @property
    def label(self) -> str:
        return f"{self.run} stage {self.stage}"


def is_saturated(ttft_mean_s: float, e2e_mean_s: float) -> bool:
    """Tell whether requests spend more than a tenth of their time before their first token."""
    return ttft_mean_s > _WAITING_SHARE * e2e_mean_s


Run = tuple[Stage, ...]
"""The stages of one server, in order."""


def read_runs(path: Path = MEASURED) -> list[Run]:
    """Return the measured runs in the order of the file."""
    frame = pd.read_csv(path)
    stages = [_stage(row) for row in frame.to_dict("records")]
    return [tuple(run) for _, run in groupby(stages, key=lambda stage: stage.run)]


def write_stages(stages: Sequence[Stage], path: Path = MEASURED) -> None:
    frame = pd.DataFrame([vars(stage) for stage in stages])
    frame.to_csv(path, index=False, float_format="%.7g")


def _stage(row: dict[Any, Any]) -> Stage:
    """Return the stage of a row of the CSV; numbers that are missing there are NaN."""
    types = {field.name: field.type for field in fields(Stage)}
    return Stage(**{name: _typed(str(types[name]), row[name]) for name in types})


def _typed(kind: str, value: Any) -> Any:
    if kind == "float":
        return float(value) if value is not None else math.nan
    return int(value) if kind == "int" else str(value)
