"""`goodput` in overload, where requests ask for different TPOTs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from slosched.core import SLO, DeadlineRule, LatencyModel, Limits
from slosched.evaluate.capacity import Outcomes
from slosched.evaluate.judge.promises import PROMISES
from slosched.perfmodel import load_model
from slosched.policy.goodput.policy import Goodput
from slosched.simulator.simulate import SimulationConfig, simulate
from slosched.workload import Trace, synthesize
from slosched.workload.slo import Tiers


def attainment(device: str, rate: float, num_requests: int) -> Mapping[float, float]:
    """Return the share of the requests in time, by TPOT, of which a third each ask for 25, 50 and
    100 ms; that of all is under 0."""
    model = load_model(device)
    trace = synthesize("azure_conv", num_requests=num_requests, rate=rate, seed=1)
    return played(trace.with_slo(PROMISES["mixed"](model, 1)), model, DeadlineRule.MEAN_TPOT)


def played(trace: Trace, model: LatencyModel, rule: DeadlineRule) -> Mapping[float, float]:
    """Return the share of the requests in time by TPOT, and that of all under 0."""
    num_blocks = int(model.provenance["kv_capacity_tokens"]) // 16
    config = SimulationConfig(Limits(deadline_rule=rule), num_blocks=num_blocks, online=True)
    outcomes = Outcomes.of(simulate(trace, Goodput(), model, config), rule)
    good: dict[float, list[bool]] = {0.0: []}
    for request, is_good in zip(trace.requests, outcomes.requests["good"], strict=True):
        good[0.0].append(is_good)
        good.setdefault(request.slo.tpot_s, []).append(is_good)
    return {tpot_s: sum(each) / len(each) for tpot_s, each in good.items()}


def test_a_tpot_that_fewer_decodes_would_keep_is_kept_in_overload() -> None:
    """It was given up as soon as there were too many decodes: 15 % of its requests were in time,
    and 54 % of all."""
    found = attainment("a100/llama-3.1-8b", rate=18, num_requests=400)
    assert found[0.025] > 0.6
    assert found[0.0] > 0.62


def test_who_asks_for_a_tpot_that_is_not_kept_takes_nothing_from_others() -> None:
    """No step on an L40S has time for more than a decode or two in 25 ms."""
    found = attainment("l40s/llama-3.1-8b", rate=7, num_requests=300)
    assert found[0.025] < 0.05
    assert found[0.050] > 0.99
    assert found[0.100] > 0.99


def test_a_tpot_is_given_up_though_there_are_few_decodes_since_prompts_are_turned_away() -> None:
    """Every gap counts, and ten TPOTs are asked for.  While the smallest was kept, a quarter of all
    prompts was turned away, whatever they asked for: 65 % of the requests were in time."""
    model = load_model("h200/llama-3.1-8b")
    tpots_s = [0.0078 * 1.2**i for i in range(10)]
    trace = synthesize("azure_conv", num_requests=250, rate=12, seed=2)
    longer = [
        replace(
            r,
            num_prompt_tokens=r.num_prompt_tokens // 2 + 1,
            num_output_tokens=4 * r.num_output_tokens,
        )
        for r in trace.requests
    ]
    tiers = Tiers(tuple(SLO(3.0, tpot_s) for tpot_s in tpots_s), (0.1,) * 10)
    found = played(replace(trace, requests=tuple(longer)).with_slo(tiers), model, DeadlineRule.TBT)
    assert found[0.0] > 0.70
