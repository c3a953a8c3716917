"""The part of docs/fidelity.md on full servers."""

from __future__ import annotations

import pandas as pd

from experiments.markdown import table


def full_servers(stages: pd.DataFrame, slowed: pd.DataFrame) -> str:
    """Return a table of how many requests ended before their clients gave up, and when.

    `slowed` has what is seen if steps are as long as measured.
    """
    both = stages[stages["is_saturated"]].merge(slowed, on="run", suffixes=("", "_slowed"))
    rows = [
        (
            f"{str(row['model']).rpartition('/')[2]}, {row['tensor_parallel']}",
            f"{row['num_succeeded'] + row['num_failed']:.0f}",
            f"{row['num_succeeded']:.0f}",
            f"{row['num_succeeded_sim']:.0f}",
            f"{row['factor']:.2f}",
            f"{row['num_succeeded_slowed']:.0f}",
            *(
                f"{100 * (row[f'{latency}_slowed'] / row[latency] - 1):+.1f} %"
                for latency in ("e2e_mean_s", "ttft_mean_s", "ttft_p50_s")
            ),
        )
        for row in both.to_dict("records")
    ]
    heads = (
        *("in saturation", "requests", "answered in 300 s", "simulated", "steps slowed by"),
        *("answered then", "mean E2E then", "mean TTFT then", "median TTFT then"),
    )
    return (
        "In saturation a client gives up after 300 s, and latencies are of the requests that were "
        "answered before. Simulated steps are too short there ([why](#misses)), and queues with "
        "them. To see whether that is all, `python -m experiments.fidelity full` slows the steps "
        "of each run down by what its mean TPOT lacks, one number a run, and simulates it "
        f"again:\n\n{table(heads, rows, 1)}\n\n{_SLOWED}"
    )


_SLOWED = (
    "So nearly all that is wrong in saturation is the time of steps: given that, as many are "
    "answered to within 5 %, and mean E2E latencies are within 9 %. Median TTFTs come out 12 to "
    "20 % too long, since real steps grow with the queue while these are equally slow from the "
    "beginning. CodeLlama's server shows how an error grows near the limit: steps that are 15 % "
    "short make the queue 76 % short."
)
