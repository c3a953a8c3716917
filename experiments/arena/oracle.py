"""What is missing: `goodput` as it is, told how long answers get, and with memory to spare.

Told lengths are not a bound: one policy uses them in one way.  Where prompts compete it gives up
those whose prefill and decodes together take longest, instead of those with the longest prefill.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from unittest.mock import patch

from experiments.arena.rows import Row, Tables, best, knee_of, pick
from experiments.arena.scenarios import Scale, Scenario
from experiments.arena.targets import FLAGSHIP, asked_of
from slosched.core import BatchShape
from slosched.evaluate.capacity import Outcomes
from slosched.perfmodel import FittedModel
from slosched.policy import goodput
from slosched.policy.kit.punctual import Order, Supply, Timed, best_order, most_by_rank
from slosched.policy.spec import make_policy
from slosched.simulator.simulate import SimulationConfig, simulate
from slosched.workload import Trace

OVERLOAD = 2.0
ROOM = 10
"""Times the KV cache of the device, where memory is to spare."""


def oracle(scenario: Scenario, scale: Scale, tables: Tables) -> Iterator[Row]:
    """Attainments at the rate that was asked for, and at twice the knee.

    `tables` hold the scenario's arena, for the rates and the setting.  Raises ValueError if not.
    """
    model = scenario.device()
    config = scenario.config(model)
    roomy = replace(config, num_blocks=ROOM * config.num_blocks)
    spec = _tuned(tables, scenario.name)
    windows = scenario.windows(scale), scenario.overload_windows(scale)
    for (at, rate), played in zip(_rates(tables, scenario.name), windows, strict=True):
        fast = [window.scaled_to(rate) for window in played]
        yield {
            "at": at,
            "rate": rate,
            "blind": _attainment(spec, fast, model, config),
            "told": _attainment(spec, fast, model, config, is_told=True),
            "roomy": _attainment(spec, fast, model, roomy),
        }


def by_all_it_takes(
    lengths: Mapping[str, int],
    decode_s: float,
    ordered: Sequence[Timed],
    supply: Supply,
    _: float = 0.0,
) -> Order:
    """Moore and Hodgson's order, but that the one goes which takes most, decodes counted."""
    takes_s = (alone_s + lengths[r.request_id] * decode_s for r, alone_s in ordered)
    return most_by_rank(ordered, supply, [(False, -all_s, i) for i, all_s in enumerate(takes_s)])


def _attainment(
    spec: str,
    windows: Sequence[Trace],
    model: FittedModel,
    config: SimulationConfig,
    is_told: bool = False,
) -> float:
    """Of all counted requests of all windows."""
    num_good = num_counted = 0
    for seed, window in enumerate(windows):
        order: Callable[..., Order] = best_order
        if is_told:
            lengths = {r.request_id: r.num_output_tokens for r in window.requests}
            order = partial(by_all_it_takes, lengths, _decode_s(model, window, config))
        with patch.object(goodput, "best_order", order):
            requests = simulate(window, make_policy(spec), model, replace(config, seed=seed))
        found = Outcomes.of(requests, config.limits.deadline_rule)
        num_good += int(found.good[found.counted].sum())
        num_counted += int(found.counted.sum())
    return num_good / num_counted


def _decode_s(model: FittedModel, window: Trace, config: SimulationConfig) -> float:
    """Of one in a step of as many as may run, in the middle of mean requests."""
    num = config.limits.max_num_seqs
    middle = round(window.prompt_tokens.mean() + window.output_tokens.mean() / 2)
    shape = BatchShape()
    shape.add_decodes([middle] * num)
    return model.predict(shape) / num


def _tuned(tables: Tables, scenario: str) -> str:
    rows = pick(tables["tuned"], scenario=scenario, contender=FLAGSHIP)
    if not rows:
        raise ValueError(f"{scenario} is not measured: python -m experiments.arena run first")
    return str(rows[0]["tuned"])


def _rates(tables: Tables, scenario: str) -> Iterator[tuple[str, float]]:
    here = pick(tables["capacity"], scenario=scenario, target=0.99, class_="with dropping")
    rival = best(here, "requests_per_s")
    if rival is None:
        raise ValueError(f"{scenario}: nobody with dropping was measured")
    yield "asked", asked_of(scenario) * float(rival["requests_per_s"])
    yield f"{OVERLOAD:g}×", OVERLOAD * knee_of(tables, scenario)
