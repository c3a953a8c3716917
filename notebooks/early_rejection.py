# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Early rejection in a burst
#
# For a few seconds, more requests arrive than the device can serve in time. What happens if all of
# them are kept, and what if some are rejected at once?

# %%
# %matplotlib inline
# %config InlineBackend.figure_formats = ["png"]
from dataclasses import replace

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

from slosched.core import SLO, DeadlineRule
from slosched.evaluate.plots import decile_lines, timeline
from slosched.metrics import RequestRecord, StepRow, summarize
from slosched.perfmodel import load_model
from slosched.policy.spec import make_policy
from slosched.simulator.simulate import SimulationConfig, simulate
from slosched.workload import Trace, synthesize
from slosched.workload.lengths import Lognormal

RULE = DeadlineRule.MEAN_TPOT

# %% [markdown]
# ## A burst
#
# Requests arrive as a Poisson process, and for a few seconds in the middle there are four times as
# many. Every request has a TTFT of one second and a TPOT of 50 ms.

# %%
CALM, BURST, BURST_AT_S, BURST_S, LASTS_S = 12.0, 36.0, 15.0, 6.0, 45.0
LENGTHS = {"prompt": Lognormal(1200, 1.0), "output": Lognormal(40, 1.0)}


def arrivals(rate: float, lasts_s: float, seed: int, start_s: float) -> list:
    made = synthesize(
        "poisson", duration_s=lasts_s, rate=rate, seed=seed, slo=SLO(1.0, 0.05), **LENGTHS
    )
    return [
        replace(r, request_id=f"{seed}-{r.request_id}", arrival_s=start_s + r.arrival_s)
        for r in made.requests
    ]


trace = Trace.of(
    [*arrivals(CALM, LASTS_S, 1, 0.0), *arrivals(BURST, BURST_S, 2, BURST_AT_S)], "a burst"
)
gpu = load_model("h100/llama-3.1-8b")
replica = SimulationConfig(num_blocks=int(gpu.provenance["kv_capacity_tokens"]) // 16)

# %% [markdown]
# ## Four policies
#
# `edf` serves the prompt that is due soonest and rejects no request. With `drop=expired` it rejects
# requests that missed their deadline while they waited. `early_rejection`, after Mooncake, predicts
# on arrival when a request would begin to decode, and rejects it if it would miss its SLO by then.
# It is a wrapper around any policy. `goodput` plans all waiting prompts in the time that decodes
# leave. It rejects prompts that would be late even if they started at once, and lets prompts wait
# that do not fit.

# %%
POLICIES = ["edf", "edf:drop=expired", "edf+early_rejection", "goodput"]
replays: dict[str, list[RequestRecord]] = {}
steps: dict[str, list[StepRow]] = {}
for name in POLICIES:
    rows: list[StepRow] = []
    requests = simulate(
        trace, make_policy(name), gpu, replica, on_row=lambda row, _, rows=rows: rows.append(row)
    )
    replays[name], steps[name] = [RequestRecord.from_request(r) for r in requests], rows

columns = ["attainment", "num_good", "num_rejected", "ttft_p99_s", "tpot_p99_s"]
scores = {name: summarize(records, RULE).as_row() for name, records in replays.items()}
pd.DataFrame(scores).T[columns].astype(float).round(3)

# %% [markdown]
# ## Attainment over time
#
# The share of good requests among those that arrived in each interval of two seconds. The grey band
# is the burst.

# %%
from slosched.evaluate.plots.style import look
from slosched.metrics import is_good

WIDTH_S = 2.0
edges = np.arange(0.0, LASTS_S + WIDTH_S, WIDTH_S)
figure, axes = plt.subplots(figsize=(8, 3), layout="constrained")
axes.axvspan(BURST_AT_S, BURST_AT_S + BURST_S, color="#DDDDDD")
for i, (name, records) in enumerate(replays.items()):
    times = np.array([record.arrival_s for record in records])
    good = np.array([is_good(record, RULE) for record in records])
    offered, _ = np.histogram(times, edges)
    served, _ = np.histogram(times[good], edges)
    axes.plot(
        edges[:-1] + WIDTH_S / 2, served / np.maximum(offered, 1), label=name, **look(i).line()
    )
axes.set(xlabel="arrival (s)", ylabel="served well", ylim=(-0.03, 1.03))
axes.legend(frameon=False, fontsize=8)
plt.show()

# %% [markdown]
# Without rejection, the queue outlives the burst. Requests that arrive after it wait behind others
# that have already missed their SLOs, so the loss goes on long after the burst has ended. Dropping
# expired requests ends that, but late: a request that cannot be in time still takes device time
# until its deadline, and in order of deadline such requests are served first. Rejecting on arrival
# leaves the time to requests that can be in time.
#
# ## What the device did
#
# The figures show batches, queue, KV cache, and the slack of the most urgent request: first without
# rejection, then with it.

# %%
timeline(steps["edf"], replays["edf"], RULE)

# %%
timeline(steps["edf+early_rejection"], replays["edf+early_rejection"], RULE)

# %% [markdown]
# During the burst the device is equally busy in both. The difference is the queue: without
# rejection, the device works long after the burst for requests that are already late.
#
# ## Which requests lose
#
# The figure shows attainment by prompt length. In order of arrival, or of equal deadlines, prompts
# of all lengths are lost alike. A policy that counts requests gives up long prompts, as each costs
# as much as several short ones. Scheduling cannot say whether that is right, but it must be
# visible.

# %%
decile_lines(replays, RULE)
