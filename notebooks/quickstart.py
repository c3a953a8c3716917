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
# # Quickstart
#
# From a measurement to a scheduling policy of your own, on a CPU, in about a minute:
# what a step is · measure steps · fit a latency model · a trace · simulate two policies ·
# which requests lose · write a policy.
#
# `slosched demo` does the same with a real model behind a real server.

# %%
# %matplotlib inline
# %config InlineBackend.figure_formats = ["png"]
from dataclasses import dataclass

import pandas as pd

from slosched.core import SLO, BatchShape, DeadlineRule, EndReason, Policy

RULE = DeadlineRule.MEAN_TPOT

# %% [markdown]
# ## A step
#
# An engine runs *steps*: one forward pass over a batch of requests. There is no prefill phase and
# no decode phase. A request has known tokens: its prompt, and its output so far. Some of them are
# computed, that is, in the KV cache, and a step computes some of the rest. One token is a decode;
# more are a chunk of a prefill.
#
# How long a step takes depends on a few sums over its batch, its *shape*. Here are two decodes
# with 300 and 800 tokens of context, including the token to compute, and a chunk of 128 tokens of a
# prompt whose first 256 are already computed.

# %%
shape = BatchShape()
shape.add(num_new_tokens=1, num_prior_tokens=299)
shape.add(num_new_tokens=1, num_prior_tokens=799)
shape.add(num_new_tokens=128, num_prior_tokens=256)
shape

# %% [markdown]
# ## Measure
#
# A plan of batches (a grid of prefills, decodes and swaps, and random mixes) is run on a model.
# `tiny-random` is a llama with random weights that loads at once: its text is noise, but its steps
# are real. `slosched profile -m smollm2-135m` does the same with a real model.

# %%
from slosched.engine.profiling import ProfileLimits, measure, plan_batches
from slosched.engine.torch import TorchExecutor
from slosched.engine.torch import load_model as load_weights
from slosched.perfmodel import Profile

weights = load_weights("tiny-random", num_threads=1)
cache = {"num_blocks": 512, "block_size": 16, "num_host_blocks": 128}
executor = TorchExecutor(weights, **cache)
limits = ProfileLimits(
    max_num_batched_tokens=256, max_num_seqs=16, max_context_tokens=1024, **cache
)
plan = plan_batches(limits, num_batches=80, seed=0)
profile = Profile(tuple(measure(executor, limits, plan, max_passes=3)), {"model": "tiny-random"})

steps = pd.DataFrame(
    [{"regime": m.regime, **m.shape.as_dict(), "ms": 1e3 * m.seconds} for m in profile.measurements]
)
steps.groupby("regime")["ms"].describe().round(2)

# %% [markdown]
# ## Fit
#
# There are seven forms, from the formula
# T = C1(t+Bd) + C2·t2 + C3·t3 + C4·⌈(t+Bd)/64⌉ + C5·[Bd>0] + C6·num_swap + C7
# to a table of the layers' times with a model of the attention kernel
# ([which is which](../docs/how-to/profile-and-fit.md)). Those whose facts the profile tells are
# fitted to the *relative* error (three of them need the number of experts or of a GPU's cores), and
# the one with the least error on held-out steps is taken. The errors are larger on a machine that
# is busy with other work.

# %%
from slosched.evaluate.plots import decile_lines, fit_plot, latency_cdfs, outcome_bars
from slosched.perfmodel import ErrorReport, fit


def error_row(error: ErrorReport) -> dict[str, float]:
    return {
        "steps": error.count,
        "mean error, %": error.mape,
        "p90, %": error.p90,
        "too low, p99, %": error.under_p99,
    }


fitted = fit(profile, seed=0)
judged = {name: e for name, e in fitted.considered.items() if isinstance(e, ErrorReport)}
print("chosen:", fitted.model.form)
pd.DataFrame({name: error_row(e) for name, e in judged.items()}).T.round(1)

# %%
pd.DataFrame({name: error_row(e) for name, e in fitted.by_regime.items()}).T.round(1)

# %%
measured = fitted.held_out_measurements
regimes = {m.regime for m in measured}
fit_plot(
    fitted.held_out_predictions_s,
    [m.seconds for m in measured],
    {name: [i for i, m in enumerate(measured) if m.regime == name] for name in sorted(regimes)},
)

# %% [markdown]
# ## A trace
#
# Latency models of real GPUs come with slosched; `bundled_models()` lists them. We take an RTX 4090
# with an 8B model and send it requests like Azure's conversations. Their lengths and bursts are
# drawn from tables fitted to the public trace; the table below compares the statistics of both.
# Every request has a TTFT of one second (time to the first token) and a TPOT of 50 ms (time for
# each further token).

# %%
from slosched.perfmodel import load_model
from slosched.workload import synthesize
from slosched.workload.synthetic import fitted_summary

gpu = load_model("rtx4090/llama-3.1-8b")
trace = synthesize("azure_conv", num_requests=600, seed=1, slo=SLO(ttft_s=1.0, tpot_s=0.05))
pd.DataFrame({"this trace": trace.summary(), "Azure, 2023": fitted_summary("azure_conv")})

# %% [markdown]
# ## Simulate
#
# The simulator runs the same scheduler as the server; only the device and the clock differ. `fcfs`
# schedules as vLLM does by default. `slo_aware` packs each step up to the tightest deadline, and
# rejects requests early that would make others late. The rate is higher than this GPU can serve in
# time.

# %%
from slosched.metrics import RequestRecord, summarize
from slosched.policy import FCFS, SLOAware
from slosched.simulator.simulate import SimulationConfig, simulate

replica = SimulationConfig(num_blocks=int(gpu.provenance["kv_capacity_tokens"]) // 16)
busy = trace.scaled_to(4.5)


def replay(policy: Policy) -> list[RequestRecord]:
    return [RequestRecord.from_request(r) for r in simulate(busy, policy, gpu, replica)]


def scores(replays: dict[str, list[RequestRecord]]) -> pd.DataFrame:
    columns = ["attainment", "good_requests_per_s", "num_rejected", "ttft_p99_s", "tpot_p99_s"]
    rows = {name: summarize(records, RULE).as_row() for name, records in replays.items()}
    return pd.DataFrame(rows).T[columns].astype(float).round(3)


replays = {"fcfs": replay(FCFS()), "slo_aware": replay(SLOAware())}
scores(replays)

# %% [markdown]
# A request is *good* if it finished and met both SLOs. *Attainment* is the share of good requests
# among all that were offered, so rejecting requests does not make a policy look better.

# %%
outcome_bars({name: summarize(records, RULE) for name, records in replays.items()})

# %%
latency_cdfs(replays)

# %% [markdown]
# Which requests lose? This is the attainment by prompt length, with a tenth of the requests in each
# group. A policy that counts requests can raise its total by giving up long prompts, and this
# figure shows it.

# %%
decile_lines(replays, RULE)

# %% [markdown]
# ## Your own policy
#
# A policy turns a view into a plan, and `BatchBuilder` keeps the plan legal: call it in order of
# priority. This one continues running requests, rejects late ones, and starts the one that is due
# soonest.

# %%
from slosched.batch import BatchBuilder
from slosched.core import SchedulerOutput, SchedulerView


@dataclass
class DueSoonest(Policy):
    """Running requests continue; then others start, the one that is due soonest first."""

    def schedule(self, view: SchedulerView) -> SchedulerOutput:
        batch = BatchBuilder(view)
        batch.add_preempting(view.running, victims=list(view.running))
        for request in sorted((*view.swapped, *view.waiting), key=lambda r: r.deadline_s):
            if request.deadline_s < view.now_s and request.num_output_tokens == 0:
                batch.reject(request, EndReason.EXPIRED)
            elif not (batch.has_left(request) or batch.preempted or batch.swapped_out):
                batch.admit(request)
        return batch.build()


# %% [markdown]
# `check_policy` plays random scenarios and checks the laws that every policy must obey: plans are
# legal, every request ends exactly once, no KV block is lost, no run stalls, and the same seed
# gives the same decisions. It raises an error with the smallest scenario that breaks a law.

# %%
from slosched.testing import check_policy

check_policy(DueSoonest, max_examples=50)

# %%
replays["due_soonest"] = replay(DueSoonest())
scores(replays)

# %%
decile_lines(replays, RULE)

# %% [markdown]
# Saved in a file, for example `mine/due.py`, it can be used on the command line:
# `slosched compare -p slo_aware -p mine.due:DueSoonest`. `docs/how-to/add-a-policy.md` describes
# how to add it to slosched.
