"""What limits goodput: it plays as it is, with the true output lengths, and with ample memory.

The policy with the true lengths is no bound, but one way of using them.  If not all prompts can be
in time, it gives up those whose prefill and decodes together take longest, not those with the
longest prefill.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

from experiments.arena.rows import Row, Tables, best, knee_of, pick
from experiments.arena.scenarios import Scale, Scenario
from experiments.arena.targets import FLAGSHIP, asked_of
from slosched.core import BatchShape, Policy
from slosched.evaluate.capacity import Outcomes
from slosched.perfmodel import FittedModel
from slosched.policy.goodput.policy import Goodput
from slosched.policy.kit.punctual import Order, Supply, Timed, most_by_rank
from slosched.policy.kit.shortage import Shortage
from slosched.policy.spec import make_policy
from slosched.simulator.simulate import SimulationConfig, simulate
from slosched.workload import Trace

OVERLOAD = 2.0
ROOM = 10
"""Factor of the KV cache's size where memory is to spare."""


def oracle(scenario: Scenario, scale: Scale, tables: Tables) -> Iterator[Row]:
    """Yield the attainments at the rate that was asked for, and at twice the knee.

    Rates and options are those of the scenario's arena in `tables`; raises ValueError if that has
    not been played.
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


@dataclass
class ToldLengths(Goodput):
    """goodput that gives up the prompts whose prefill and decodes together take longest."""

    num_output_tokens: Mapping[str, int] = field(default_factory=dict)
    """Length of every answer, by request id."""
    decode_s: float = 0.0
    """Time that one token of an answer takes."""

    def order(self, shortage: Shortage) -> Order:
        lengths, decode_s = self.num_output_tokens, self.decode_s
        return by_all_it_takes(lengths, decode_s, shortage.prompts, shortage.supply)


def by_all_it_takes(
    num_output_tokens: Mapping[str, int], decode_s: float, ordered: Sequence[Timed], supply: Supply
) -> Order:
    """Return Moore and Hodgson's order, in which the length of a job includes its decodes."""
    takes_s = (alone_s + num_output_tokens[r.request_id] * decode_s for r, alone_s in ordered)
    return most_by_rank(ordered, supply, [(False, -all_s, i) for i, all_s in enumerate(takes_s)])


def _attainment(
    spec: str,
    windows: Sequence[Trace],
    model: FittedModel,
    config: SimulationConfig,
    is_told: bool = False,
) -> float:
    """Return the share of good ones among the counted requests of all windows."""
    num_good = num_counted = 0
    for seed, window in enumerate(windows):
        policy = make_policy(spec)
        if is_told:
            policy = _told(policy, window, _decode_s(model, window, config))
        requests = simulate(window, policy, model, replace(config, seed=seed))
        found = Outcomes.of(requests, config.limits.deadline_rule)
        num_good += int(found.good[found.counted].sum())
        num_counted += int(found.counted.sum())
    return num_good / num_counted


def _told(policy: Policy, window: Trace, decode_s: float) -> ToldLengths:
    """Return a policy with the options of `policy` that knows the answers of `window`."""
    if not isinstance(policy, Goodput):
        raise TypeError(f"lengths are told to goodput alone, not to {policy}")
    lengths = {r.request_id: r.num_output_tokens for r in window.requests}
    options = {option.name: getattr(policy, option.name) for option in fields(policy)}
    return ToldLengths(**options, num_output_tokens=lengths, decode_s=decode_s)


def _decode_s(model: FittedModel, window: Trace, config: SimulationConfig) -> float:
    """Return one decode's part of a step of as many as may run, in the middle of mean requests."""
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
