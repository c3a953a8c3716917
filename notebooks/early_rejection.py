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
# For some seconds more is asked than the device can serve in time. What becomes of the requests if
# all are kept, and what if some are turned away at once?

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
# Calm Poisson arrivals, and for a few seconds in the middle four times as many. Every request is
# promised its first token within a second, and 50 ms for each further one.

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
# ## Four ways to take it
#
# `edf` serves the prompt that is due soonest and turns nobody away. With `drop=expired` it gives up
# what has missed its deadline while it waited. `early_rejection`, after Mooncake, predicts on
# arrival when a request would begin to decode and refuses it if the promise would be broken by
# then; it is a wrapper that any policy can take. `goodput` plans all waiting prompts in the time
# that decodes leave, rejects those that even at once could not be in time, and lets those wait that
# do not fit.

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
# Of the requests that arrived in each two seconds, the share that was served well. The grey band is
# the burst.

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
# Who is kept for ever is kept too long. Without rejection the queue outlives the burst: requests
# that arrive when the load is calm again wait behind others whose promises are broken already, so
# the loss goes on long after its cause. Dropping what has expired ends that, but late: until its
# deadline a doomed request takes turns, and in order of deadline it is always the most nearly late
# that is served. Refusing on arrival leaves the time to those who can be served.
#
# ## What the device did
#
# Batches, queue, cache, and the slack of the most urgent request; first without rejection, then
# with.

# %%
timeline(steps["edf"], replays["edf"], RULE)

# %%
timeline(steps["edf+early_rejection"], replays["edf+early_rejection"], RULE)

# %% [markdown]
# While the burst lasts the device is as busy in both. What differs is the queue, and with it for
# whom it works: without rejection it goes on long after, for requests that are late already.
#
# ## Who pays
#
# Attainment by prompt length. In order of arrival, or of deadlines that are alike for all, who is
# lost is a matter of bad luck: long and short alike. A policy that counts requests gives up the
# long ones, of which each costs several short ones. Whether that is right is no question of
# scheduling, but it must be seen.

# %%
decile_lines(replays, RULE)
