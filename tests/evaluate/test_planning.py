"""The search for the cheapest fleet, what no fleet can serve, and how fleets are judged."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from pathlib import Path
from random import Random

import numpy as np
import pytest

from slosched.cli.gpu_offers import model_on
from slosched.core import SLO, DeadlineRule, Limits
from slosched.evaluate.capacity.outcomes import OUTCOME, Outcomes
from slosched.evaluate.planning import Counts, Offer, Search, priced, reach_of
from slosched.evaluate.planning.trials import judge
from slosched.fleet.view import ReplicaKind
from slosched.perfmodel import LinearCoefficients, LinearModel, load_model
from slosched.simulator.simulate import SimulationConfig
from slosched.workload import synthesize
from slosched.workload.trace import Trace, TraceRequest

MOST = 9


def served_by(rates: list[float], load: float, counts: Counts) -> float:
    """Return the share of the load that replicas with these rates serve."""
    return min(1.0, sum(n * rate for n, rate in zip(counts, rates, strict=True)) / load)


@pytest.mark.parametrize("seed", range(40))
def test_the_search_finds_the_two_cheapest_fleets_of_at_most_two_kinds(seed: int) -> None:
    rng = Random(seed)
    num_kinds = rng.choice((1, 2, 2, 3))
    rates = [rng.uniform(1, 8) for _ in range(num_kinds)]
    prices = [rng.uniform(0.5, 1.5) * rate for rate in rates]
    load = rng.uniform(1, 30)
    tried: list[Counts] = []

    def try_fleet(counts: Counts) -> float:
        tried.append(counts)
        return served_by(rates, load, counts)

    guesses = [rng.randint(1, 20) for _ in rates]
    search = Search(prices, guesses, 0.99, MOST, try_fleet)
    found = search.run()
    enough = [
        counts
        for counts in product(range(MOST + 1), repeat=num_kinds)
        if sum(map(bool, counts)) in (1, 2) and served_by(rates, load, counts) >= 0.99
    ]
    enough.sort(key=search.price)
    assert len(tried) == len(set(tried)), "no fleet is tried twice"
    if not enough:
        assert found.best is None
        return
    best = enough[0]
    assert found.best == best
    others = [c for c in enough if any(a < b for a, b in zip(c, best, strict=True))]
    assert found.second == (others[0] if others else None)
    assert found.grows
    assert found.more in tried
    assert len(tried) <= 12 * num_kinds**2, "a grid of all has up to 700"


def test_few_fleets_of_one_kind_are_tried_wherever_the_search_begins() -> None:
    for guess in (1, 30, 64):
        tried: list[Counts] = []

        def try_fleet(counts: Counts, tried: list[Counts] = tried) -> float:
            tried.append(counts)
            return served_by([1.0], 29.5, counts)

        assert Search([1.0], [guess], 1.0, 64, try_fleet).run().best == (30,)
        assert len(tried) <= 12


def test_a_larger_fleet_that_serves_less_is_told() -> None:
    found = Search([1.0], [2], 0.9, 8, lambda counts: 0.95 if counts == (2,) else 0.5).run()
    assert (found.best, found.more, found.grows) == ((2,), (3,), False)


def linear(prefill_token_s: float, constant_s: float) -> LinearModel:
    return LinearModel(LinearCoefficients(prefill_token_s, 0, 0, 0, 0, 0, constant_s=constant_s))


def trace_of(*lines: tuple[int, int], slo: SLO) -> Trace:
    requests = [TraceRequest(f"r{i}", float(i), *line, slo) for i, line in enumerate(lines)]
    return Trace.of(requests, "test")


def test_what_is_late_alone_on_a_replica_is_out_of_reach() -> None:
    # A prefill takes 0.1 s and 1 ms a token, a decode 101 ms.
    kind = ReplicaKind(linear(0.001, 0.1), SimulationConfig(num_blocks=100))
    lines = [(100, 10), (400, 10), (900, 1), (1590, 20)]
    reach = reach_of(kind, [trace_of(*lines, slo=SLO(0.5, 0.2))])
    assert (reach.share, reach.too_late, reach.too_slow, reach.too_long) == (0.5, 0.5, 0.0, 0.25)
    tight = reach_of(kind, [trace_of(*lines, slo=SLO(9.0, 0.1))])
    assert (tight.share, tight.too_slow) == (0.25, 0.75), "the third one has no decode"
    said = tight.why("slow")
    assert "slow: no number of replicas has more than 25.0%" in said
    assert "75.0% miss their TPOT, as a decode takes 101 ms" in said
    assert "25.0% do not fit into the KV cache" in said


def test_what_comes_early_makes_up_for_slow_decodes_under_the_envelope() -> None:
    # A prefill of 100 tokens takes 0.2 s, a decode 0.1 s: the last of 10 tokens comes at 1.1 s, and
    # of 100 at 10.1 s.
    lines = [(100, 10), (100, 100)]
    banking = replace(SimulationConfig(), limits=Limits(deadline_rule=DeadlineRule.ENVELOPE))
    kind = ReplicaKind(linear(0.001, 0.1), banking)
    reach = reach_of(kind, [trace_of(*lines, slo=SLO(1.0, 0.08))])
    assert (reach.share, reach.too_late, reach.too_slow) == (0.5, 0.0, 0.5)
    late = reach_of(kind, [trace_of(*lines, slo=SLO(0.1, 0.08))])
    assert (late.too_late, late.too_slow) == (1.0, 1.0), "nothing is early"
    assert reach_of(kind, [trace_of(*lines, slo=SLO(math.inf, 0.08))]).share == 1.0


def test_a_guess_is_near_what_the_rate_needs() -> None:
    # Steps of 0.1 s with at most 256 decodes, of which a tenth end, sustain 256 requests/s.
    kind = ReplicaKind(linear(0.0, 0.1), SimulationConfig(num_blocks=4096))
    offer = Offer("a", "a", kind, 1.0)
    trace = trace_of(*[(4, 10)] * 10, slo=SLO(1.0, 0.2))
    assert offer.guess(trace, 0.8 * 256 * 2.9) == 3


def test_a_replica_of_four_gpus_costs_four_times_as_much() -> None:
    kind = ReplicaKind(load_model("h100/llama-3.1-70b-tp4"), SimulationConfig())
    assert Offer("h100", "h100/llama-3.1-70b-tp4", kind, 2.5).price == 10.0


@pytest.mark.parametrize("text", ["h100", "h100=", "=2", "h100=free", "h100=0", "h100=-1", "a=inf"])
def test_a_gpu_without_a_positive_price_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not NAME=PRICE"):
        priced(text)


def test_a_gpu_is_priced_by_its_last_equals_sign() -> None:
    assert priced("runs/a=b/model.json=2.5") == ("runs/a=b/model.json", 2.5)


def test_a_gpu_stands_for_the_latency_model_of_the_model_on_it() -> None:
    assert model_on("h100", "llama-3.1-8b") == "h100/llama-3.1-8b"
    assert model_on("a100", "llama-3.1-70b") == "a100/llama-3.1-70b-tp4"
    assert model_on("l4/llama-3.2-3b", "llama-3.1-8b") == "l4/llama-3.2-3b"
    with pytest.raises(ValueError, match="did you mean h100"):
        model_on("h10", "llama-3.1-8b")
    with pytest.raises(ValueError, match="no latency model of"):
        model_on("l4", "llama-3.1-70b")


def test_a_gpu_is_named_in_upper_or_lower_case() -> None:
    assert model_on("H100", "Llama-3.1-8B") == "h100/llama-3.1-8b"
    assert model_on("H100/Llama-3.1-8B", "qwen3-8b") == "h100/llama-3.1-8b", "one model, one name"
    assert model_on("Runs/mine.json", "qwen3-8b") == "Runs/mine.json"


def test_a_folder_with_the_name_of_a_gpu_is_no_latency_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "h100").mkdir()
    monkeypatch.chdir(tmp_path)
    assert model_on("h100", "llama-3.1-8b") == "h100/llama-3.1-8b"


def outcomes(good: list[bool]) -> Outcomes:
    rows = [(float(i), 0.5, 0.1, 0.01, 4, True, is_good) for i, is_good in enumerate(good)]
    return Outcomes(np.array(rows, dtype=OUTCOME))


def test_a_fleet_is_judged_by_all_windows_after_the_warm_up() -> None:
    windows = [synthesize("poisson", num_requests=100, rate=1.0, seed=seed) for seed in range(3)]
    # The warm-up is 1 s, which the first request spends.
    half = [i % 2 == 0 for i in range(100)]
    judged = judge(
        [outcomes([True] * 100), outcomes(half), outcomes([False] + [True] * 99)], windows
    )
    assert judged.attainment == pytest.approx((99 + 49 + 99) / 297)
    assert 0 <= judged.interval.low < 0.75 < judged.attainment < judged.interval.high <= 1
    assert not judged.is_short
    sure = judge([outcomes([True] * 100)] * 3, windows)
    assert (sure.attainment, *sure.interval) == (1.0, 1.0, 1.0)
    assert math.isfinite(judged.interval.low)
