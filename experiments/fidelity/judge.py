"""How far the simulator is off, with the one time that is learnt from two of the runs."""

from __future__ import annotations

import pandas as pd

from experiments.fidelity.results import LEARNT_FROM, SEEN
from experiments.fidelity.stages import is_saturated

LATENCIES = ("e2e_mean_s", "ttft_mean_s", "ttft_p50_s", "ttft_p99_s")


def learn_per_request_s(stages: pd.DataFrame) -> float:
    """Return what the server adds to a TTFT: the median of what the median TTFT lacks.

    It is learnt from the stages of `LEARNT_FROM` alone.
    """
    known = stages[stages["run"].isin(LEARNT_FROM)]
    return max(0.0, float((known["ttft_p50_s"] - known["ttft_p50_s_sim"]).median()))


def judge(simulated: pd.DataFrame, per_request_s: float) -> pd.DataFrame:
    """Return the stages with the server's time per request, and with errors in percent.

    `is_judged` tells which stages nothing was learnt from, `is_seen` which of them are of models
    whose misses led to a rule, and `is_saturated` where requests queue.
    The time per request delays all requests alike, so it is added to latencies that were simulated
    without it.
    """
    stages = simulated.copy()
    for latency in LATENCIES:
        seen_s = stages[f"{latency}_sim"] + per_request_s
        stages[f"{latency}_sim"] = seen_s
        stages[f"{latency}_error"] = 100 * (seen_s / stages[latency] - 1)
    for suffix in ("", "_sim"):
        span_s = stages[f"e2e_mean_s{suffix}"] - stages[f"ttft_mean_s{suffix}"]
        stages[f"tpot_mean_s{suffix}"] = span_s / (stages["output_tokens"] - 1)
    stages["tpot_mean_s_error"] = 100 * (stages["tpot_mean_s_sim"] / stages["tpot_mean_s"] - 1)
    stages["is_judged"] = ~stages["run"].isin(LEARNT_FROM)
    stages["is_seen"] = stages["model"].str.rpartition("/")[2].isin(SEEN)
    stages["is_saturated"] = [is_saturated(*means) for means in zip(*_means(stages), strict=True)]
    return stages


def _means(stages: pd.DataFrame) -> tuple[pd.Series, pd.Series]:
    return stages["ttft_mean_s"], stages["e2e_mean_s"]
