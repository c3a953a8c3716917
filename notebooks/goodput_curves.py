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
# What a policy makes of more and more load: good requests a second, how sure that is, and what no
# scheduler at all could exceed. Everything here is a small version of `slosched capacity`; the
# large one, of all policies in many scenarios, is in `docs/arena.md`.

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
# A measured latency model stands for the GPU. Four windows of bursty requests with short answers
# are made up, each from a seed of its own: their spread is what the intervals will be made of.
# Every request is promised its first token in half a second and 25 ms for each further one.

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
# Three policies: decodes first and prompts in order of arrival (`sarathi`); the prompt that is due
# soonest, with those rejected that can no longer be in time (`edf`); and `goodput`. A sweep looks
# for the highest rate at which each still serves a target share of the *offered* requests well. A
# rejected request is a miss like a late one. All are played at the same rates, on the same
# requests.

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
# Look at the widths. A capacity alone is not known well: bursts differ from window to window, and
# four windows are few. A *ratio* is resampled in pairs, both policies in the same windows, so that
# what the windows have in common cancels. Wherever its interval holds 1, nothing has been shown.
#
# ## What no scheduler can exceed
#
# Two bounds count requests whose work cannot fit into the device's time, whatever the order: L1
# over the whole window, L2 between each arrival and its deadlines. They know all lengths and
# arrivals in advance, which no scheduler does. (They count all requests of a window; the curves
# leave out its warm-up.)

# %%
limits, kv_tokens = replica.limits, replica.num_blocks * replica.block_size
longest = max(longest_context(window) for window in windows)
steps = LegalSteps(gpu, limits, longest, kv_tokens)
prices = steps.dearest(sum(token_weights(window) for window in windows))
demands = [demand_at(prices, shortest_step_s(gpu), window, limits, kv_tokens) for window in windows]


def most_good_per_s(rate: float) -> float:
    """Of all windows, played at this rate."""
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
# On the left all curves lie on the dotted line: everything that is offered is served well. Then
# they part. A policy that never gives up (`sarathi`) goes over a cliff: once the queue is longer
# than the promise, every prompt that it finishes is late already, and goodput falls although the
# device is as busy as before. Policies that reject keep what they have, and which requests they
# reject decides how much more they gain. How far the dashed line lies above the best possible,
# nobody knows; between it and the best curve is all that is left to be won.

# %%
attainment_curves(curve)

# %% [markdown]
# The same as a share of what was offered. Where a curve crosses a dashed line is a capacity of the
# table. The order of the policies at 99 % need not be that at 90 %: a policy that gives up the
# longest prompts first looks best where a tenth may be lost, and 99 % leaves it no such way out.
