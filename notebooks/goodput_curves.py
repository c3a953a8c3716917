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
# # Goodput curves
#
# How many good requests a second does a policy serve as the load grows, how certain is that, and
# what can no scheduler exceed? This is a small version of `slosched capacity`. The large one, with
# all policies in many scenarios, is in `docs/arena.md`.

# %%
# %matplotlib inline
# %config InlineBackend.figure_formats = ["png"]
import numpy as np
import pandas as pd

from slosched.core import SLO
from slosched.evaluate.bounds import LegalSteps, fluid_bound, on_time_bound
from slosched.evaluate.bounds.demand import (
    demand_at,
    longest_context,
    shortest_step_s,
    token_weights,
)
from slosched.evaluate.capacity import Contender, Plan, Study, Sweep, local_pool
from slosched.evaluate.plots import attainment_curves, goodput_curves
from slosched.perfmodel import load_model
from slosched.simulator.simulate import SimulationConfig
from slosched.workload import synthesize
from slosched.workload.lengths import Lognormal

# %% [markdown]
# ## The same requests for all
#
# A bundled latency model stands for the GPU. Four windows of bursty requests with short answers are
# made up, each with its own seed. The spread between them gives the intervals. Every request has a
# TTFT of half a second and a TPOT of 25 ms.

# %%
gpu = load_model("h100/llama-3.1-8b")
replica = SimulationConfig(num_blocks=int(gpu.provenance["kv_capacity_tokens"]) // 16)
windows = [
    synthesize(
        "gamma",
        cv=1.5,
        num_requests=160,
        seed=seed,
        slo=SLO(ttft_s=0.5, tpot_s=0.025),
        prompt=Lognormal(mean_tokens=1200, cv=1.0),
        output=Lognormal(mean_tokens=24, cv=1.0),
    )
    for seed in range(4)
]
pd.DataFrame([window.summary() for window in windows])

# %% [markdown]
# ## Search
#
# There are three policies. `sarathi` schedules decodes first, and prompts in order of arrival.
# `edf` here rejects prompts that can no longer be in time, and runs the one that is due soonest
# first. The third is `goodput`. A sweep searches the highest rate at which each still serves a
# target share of the *offered* requests well. A rejected request is a miss, like a late one. All
# policies get the same requests at the same rates.

# %%
policies = ["sarathi", "edf:drop=infeasible", "goodput"]
contenders = [Contender(p, p, gpu, "h100/llama-3.1-8b", replica) for p in policies]
plan = Plan(targets=(0.90, 0.99), precision=0.1, num_shared_rates=5)
sweep = Sweep(contenders, windows, plan)
sweep.run(local_pool(jobs=1))
study = Study(list(sweep.measured.values()), windows)


def capacity_row(policy: str, target: float) -> dict[str, object]:
    found, ratio = study.capacity(policy, target), study.ratio(policy, policies[0], target)
    return {
        "policy": policy,
        "target": f"{target:.0%}",
        "requests/s": found.requests_per_s,
        "low": found.interval.low,
        "high": found.interval.high,
        f"÷ {policies[0]}": ratio.value,
        "ratio low": ratio.interval.low,
        "ratio high": ratio.interval.high,
    }


rows = [capacity_row(policy, target) for target in plan.targets for policy in policies]
pd.DataFrame(rows).set_index(["target", "policy"]).round(2)

# %% [markdown]
# Look at the widths of the intervals. A capacity alone is uncertain: bursts differ from window to
# window, and four windows are few. A *ratio* is resampled in pairs, with both policies in the same
# windows, so the differences between windows cancel. If its interval contains 1, the two policies
# do not differ significantly.
#
# ## What no scheduler can exceed
#
# Two bounds count requests whose work cannot fit into the device's time in any order: L1 over the
# whole window, L2 between each arrival and its deadlines. They know all lengths and arrivals in
# advance, unlike any scheduler. (They count all requests of a window; the curves leave out its
# warm-up.)

# %%
limits, kv_tokens = replica.limits, replica.num_blocks * replica.block_size
longest = max(longest_context(window) for window in windows)
steps = LegalSteps(gpu, limits, longest, kv_tokens)
prices = steps.dearest(sum(token_weights(window) for window in windows))
demands = [demand_at(prices, shortest_step_s(gpu), window, limits, kv_tokens) for window in windows]


def most_good_per_s(rate: float) -> float:
    """Return the bound on good requests/s over all windows at this rate."""
    faster = [d.at_speed(rate / w.rate) for d, w in zip(demands, windows, strict=True)]
    possible = [min(fluid_bound(d).num_good, on_time_bound(d).num_good) for d in faster]
    return rate * sum(possible) / sum(d.num_offered for d in demands)


curve = study.frame()
shared = np.linspace(curve["rate"].min(), curve["rate"].max(), 5)
bound = np.interp(curve["rate"], shared, [most_good_per_s(rate) for rate in shared])
curve = curve.assign(bound_requests_per_s=bound, bound_name="L1, L2")

# %%
goodput_curves(curve)

# %% [markdown]
# On the left all curves lie on the dotted line: all offered requests are served well. Then the
# curves separate. The goodput of a policy that never rejects (`sarathi`) falls steeply: once the
# queue takes longer than the TTFT, every prompt that it finishes is late, although the device is as
# busy as before. Policies that reject keep their goodput, and their choice of requests to reject
# decides how much more they gain. The dashed line is the bound. How far it lies above the best
# possible is unknown, but no policy can gain more than the distance to it.

# %%
attainment_curves(curve)

# %% [markdown]
# This figure shows the same as a share of the offered requests. The point where a curve crosses a
# dotted line is a capacity in the table. The order of the policies at 99 % can differ from that at
# 90 %: a policy that gives up the longest prompts first looks best if a tenth may be lost, but not
# if only one in a hundred may be.
