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
# who pays for the difference · write a policy.
#
# `slosched demo` walks the same path with a real model behind a real server.

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
# no decode phase. A request has tokens that are known (its prompt, and what came out so far), of
# which some are computed, that is, in the KV cache; a step computes some of the rest. One token is
# a decode; more are a chunk of a prefill.
#
# How long a step takes depends on a few sums over its batch, its *shape*. Here are two decodes
# with 300 and 800 tokens of context, their own included, and a chunk of 128 tokens of a prompt
# whose first 256 are computed already.

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
# `tiny-random` is a llama of random weights that loads in no time: its text is noise, its steps are
# real. `slosched profile -m smollm2-135m` does the same with a real model.

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
# Five forms, from the formula T = C1(t+Bd) + C2·t2 + C3·t3 + C4·⌈(t+Bd)/64⌉ + C5·[Bd>0] +
# C6·num_swap + C7 to a table of the layers' times with a model of the attention kernel
# ([which is which](../docs/how-to/profile-and-fit.md)). All are fitted to the *relative* error, and
# the one with the least error on steps that it has not seen is taken. On a machine that does other
# things at the same time errors are larger.

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
# Real GPUs come bundled as latency models; `bundled_models()` names them. We take an RTX 4090 with
# an 8B model, and ask of it the mix of Azure's conversations: lengths and bursts are drawn from
# tables fitted to the public trace, whose own statistics stand beside those of our sample. Every
# request is promised its first token within a second (TTFT) and 50 ms for each further one (TPOT).

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
# The simulator runs the scheduler that serves: only the device and the clock are exchanged. `fcfs`
# is what vLLM does by default; `slo_aware` packs each step up to the tightest deadline and rejects
# early what would make others late. The rate is more than this GPU can serve in time.

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
# A request is *good* if it finished and kept both promises; *attainment* is the share of good ones
# among all that were offered, so that rejecting is no way to look better.

# %%
outcome_bars({name: summarize(records, RULE) for name, records in replays.items()})

# %%
latency_cdfs(replays)

# %% [markdown]
# Who pays? Attainment by prompt length, a tenth of the requests each. A policy that counts requests
# can raise its total by giving up long prompts, and this is where it shows.

# %%
decile_lines(replays, RULE)

# %% [markdown]
# ## Your own policy
#
# A policy turns a view into a plan, and `BatchBuilder` keeps the plan legal: call it in order of
# priority. This one serves what runs, gives up what is late, and starts what is due soonest.

# %%
from slosched.batch import BatchBuilder
from slosched.core import SchedulerOutput, SchedulerView


@dataclass
class DueSoonest(Policy):
    """What runs goes on; then those in time start, the one due soonest first."""

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
# `check_policy` plays random scenarios against the laws that every policy must hold: plans are
# legal, every request ends exactly once, no KV block is lost, nothing stalls, the same seed gives
# the same decisions. It raises with the smallest scenario that breaks one.

# %%
from slosched.testing import check_policy

check_policy(DueSoonest, max_examples=50)

# %%
replays["due_soonest"] = replay(DueSoonest())
scores(replays)

# %%
decile_lines(replays, RULE)

# %% [markdown]
# In a file, `mine/due.py` say, it is at once a policy of the command line:
# `slosched compare -p slo_aware -p mine.due:DueSoonest`. To make it one of the house, see
# `docs/how-to/add-a-policy.md`.
