"""Replays of a portfolio's question, and portfolios in the simulator."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from factories import make_model

from slosched.core import SLO, BatchShape, DeadlineRule, Limits, Request
from slosched.metrics import RequestRecord, is_good
from slosched.perfmodel import OnlineModel, load_model
from slosched.perfmodel.frozen import frozen, is_unchanging
from slosched.policy.fcfs import FCFS
from slosched.policy.portfolio.policy import Portfolio, portfolio_in
from slosched.policy.portfolio.question import PastRequest, Question
from slosched.policy.spec import make_policy
from slosched.simulator.disturbances import Disturbances
from slosched.simulator.lengths import Lengths
from slosched.simulator.race import answer
from slosched.simulator.rehearsal import Passes, Rehearsal, draw_lengths
from slosched.simulator.simulate import SimulationConfig, simulate
from slosched.simulator.turns import first_alike
from slosched.workload import Trace, TraceRequest

SPECS = "portfolio:every_s=2,delay_s=0.5,window_s=10|goodput|edf:drop=infeasible"


def past(arrival_s: float, prompt: int = 100, output: int = 20, **fields: object) -> PastRequest:
    known: dict[str, object] = {"has_ended": True, "slo": SLO(1.0, 0.05)}
    return PastRequest(
        arrival_s=arrival_s,
        num_prompt_tokens=prompt,
        max_tokens=1000,
        num_output_tokens=output,
        priority=0,
        lora_id=None,
        **(known | fields),  # type: ignore[arg-type]
    )


def question(*requests: PastRequest, candidates: tuple[str, ...] = ("goodput",)) -> Question:
    return Question(
        requests=requests,
        output_lengths=(10, 20, 30),
        candidates=candidates,
        current=candidates[0],
        eliminated=("fcfs",),
        limits=Limits(),
        num_blocks=1000,
        block_size=16,
        num_host_blocks=0,
        latency_model=make_model(),
        horizon_s=0.0,
        max_requests=800,
        min_gain=0.005,
        seed=0,
    )


class TestLengths:
    def test_a_request_that_has_ended_emits_what_it_emitted(self) -> None:
        assert draw_lengths(question(past(0.0, output=7))) == [7]

    def test_other_lengths_are_of_finished_requests_that_were_longer(self) -> None:
        running = [past(float(i), output=15, has_ended=False) for i in range(50)]
        assert set(draw_lengths(question(*running))) == {20, 30}

    def test_a_request_longer_than_all_finished_ones_ends_at_the_mean_rate(self) -> None:
        """Three ended in 60 + 40 × 99 tokens, so the forty have 1,340 tokens to go in the mean."""
        running = [past(float(i), output=99, has_ended=False) for i in range(40)]
        more = [length - 99 for length in draw_lengths(question(*running))]
        assert min(more) > 0
        assert 0.6 * 901 < np.mean(more) < 901  # cut off at the limit of 1,000 tokens

    def test_who_still_runs_counts_among_the_long_ones(self) -> None:
        """Of a hundred with 10 to 1,000 tokens that began together, those up to 300 have ended."""
        true = range(10, 1010, 10)
        ended = [length for length in true if length <= 300]
        lengths = Lengths(ended, [300] * (len(true) - len(ended)))
        drawn = [lengths.longer_than(0, place) for place in np.linspace(0, 1, 1000, endpoint=False)]
        assert np.mean(np.array(drawn) <= 300) == pytest.approx(0.3, abs=0.01)
        assert np.mean(drawn) > 2 * np.mean(ended)

    def test_a_length_does_not_depend_on_how_many_others_have_ended(self) -> None:
        first, second = past(0.0, output=0, has_ended=False), past(1.0, output=5)
        both = draw_lengths(question(second, first))
        alone = draw_lengths(question(second._replace(has_ended=False), first))
        assert both[1] == alone[1]


def verdicts(asked: Question) -> list[bool]:
    """Return which requests are good if they arrive once and FCFS serves them."""
    once = Passes(first=0, num_passes=1, period_s=0.0)
    replay = Rehearsal(asked, once, draw_lengths(asked), make_policy("fcfs"))
    return [share == 1 for share in replay.judge(len(asked.requests))]


class TestRehearsal:
    def test_requests_on_an_idle_replica_are_good(self) -> None:
        assert verdicts(question(past(0.0), past(5.0))) == [True, True]

    def test_decodes_that_ran_when_the_window_began_take_their_time(self) -> None:
        """Two hundred decodes make a step of 20 ms into one of 31 ms or more."""
        tight = past(0.0, prompt=2000, slo=SLO(1.0, 0.012))
        running = [
            past(-1.0, 3000, 400, num_emitted_before=10, first_token_s=-0.5, last_token_s=-0.1)
            for _ in range(200)
        ]
        alone = question(tight)
        beside = replace(question(*running, tight), num_blocks=60_000)
        assert verdicts(alone)[-1]
        assert not verdicts(beside)[-1]

    def test_decodes_without_room_wait(self) -> None:
        running = [
            past(-1.0, 800, 40, num_emitted_before=9, first_token_s=-0.5, last_token_s=-0.1)
            for _ in range(4)
        ]
        short = replace(question(*running, past(0.0)), num_blocks=120)
        assert len(verdicts(short)) == 5

    def test_arrivals_of_a_short_window_are_repeated(self) -> None:
        """Prompts arrive faster than they are served: the second time some still wait."""
        burst = [past(i / 16, prompt=4_000, slo=SLO(1.5, 1.0)) for i in range(36)]
        asked = question(*burst, candidates=("fcfs", "edf"))
        asked = replace(asked, num_blocks=10_000, min_gain=-1.0)  # nobody drops out
        once = answer(asked)
        asked = replace(asked, horizon_s=20.0)
        repeated = answer(asked)
        assert len(repeated.good["fcfs"]) == len(once.good["fcfs"]) == 36 - once.num_unjudged
        assert set(once.good["fcfs"]) <= {0.0, 1.0}
        assert sum(repeated.good["fcfs"]) < sum(once.good["fcfs"])
        few = answer(replace(asked, max_requests=len(burst)))
        assert few.good == once.good, "no more than max_requests arrivals are replayed"

    def test_a_candidate_that_dropped_out_keeps_its_distance(self) -> None:
        """The later passes are harder for all: it must not look better for having left."""
        burst = [past(i / 16, prompt=4_000, slo=SLO(1.5, 1.0)) for i in range(36)]
        candidates = ("fcfs:drop=infeasible", "fcfs", "edf:drop=infeasible")
        asked = question(*burst, candidates=candidates)
        asked = replace(asked, num_blocks=10_000, horizon_s=20.0)
        raced, together = answer(asked).good, answer(replace(asked, min_gain=-1.0)).good
        assert raced["edf:drop=infeasible"] == together["edf:drop=infeasible"]
        assert raced["fcfs"] != together["fcfs"], "it dropped out"
        assert sum(raced["fcfs"]) < sum(raced["fcfs:drop=infeasible"])

    def test_steps_are_irregular_only_where_every_gap_counts(self) -> None:
        model = OnlineModel(make_model())
        shape = BatchShape()
        shape.add(512, 0)
        for i in range(200):
            model.observe(shape, (1.5 if i % 2 else 0.7) * model.base.predict(shape))
        asked = question(*(past(i / 5, slo=SLO(1.0, 0.021)) for i in range(40)))
        asked = replace(asked, latency_model=frozen(model))
        strict = replace(asked, limits=replace(asked.limits, deadline_rule=DeadlineRule.TBT))
        assert sum(verdicts(strict)) < sum(verdicts(asked))

    def test_too_few_requests_are_not_replayed(self) -> None:
        found = answer(question(*(past(float(i)) for i in range(10))))
        assert not found.good
        assert not found.failed

    def test_a_candidate_drops_out_once_it_surely_gains_nothing(self) -> None:
        """All that were in trouble came first, and one candidate is as good as the other."""
        requests = [past(i / 4, in_trouble=i < 30) for i in range(80)]
        found = answer(question(*requests, candidates=("fcfs", "edf")))
        assert len(found.good["edf"]) == len(found.good["fcfs"]) < 80 - found.num_unjudged
        late = [past(i / 4, in_trouble=i > 70) for i in range(80)]
        found = answer(question(*late, candidates=("fcfs", "edf")))
        assert len(found.good["edf"]) == 80 - found.num_unjudged

    def test_the_same_question_has_the_same_answer(self) -> None:
        requests = [past(i / 10, 500 * (i % 5 + 1), has_ended=i % 2 == 0) for i in range(60)]
        asked = question(*requests, candidates=("goodput", "edf", "sarathi"))
        first, again = answer(asked), answer(asked)
        assert first.good == again.good
        assert set(first.good) == {"goodput", "edf", "sarathi"}
        assert first.cpu_s > 0

    def test_a_candidate_that_fails_leaves_the_others_their_answer(self) -> None:
        requests = (past(i / 4) for i in range(40))
        found = answer(question(*requests, candidates=("goodput", "no_such_policy")))
        assert set(found.good) == {"goodput"}
        assert "no_such_policy" in found.failed["no_such_policy"]


class TestTurns:
    def test_the_first_quarter_is_not_judged(self) -> None:
        requests = [past(float(i)) for i in range(41)]
        assert first_alike(requests) == (10, False)

    def test_other_prompts_are_a_turn(self) -> None:
        rng = np.random.default_rng(0)
        lengths = [*rng.integers(100, 500, 299), *rng.integers(1000, 5000, 101)]
        requests = [past(i / 10, int(length)) for i, length in enumerate(lengths)]
        index, has_turned = first_alike(requests)
        assert has_turned
        assert index == 299
        found = answer(question(*requests))
        assert found.num_unjudged == index
        assert "fcfs" in found.good, "after a turn eliminated candidates are asked again"

    def test_other_promises_are_a_turn(self) -> None:
        requests = [past(i / 10, slo=SLO(1.0, 0.05 if i < 299 else 0.02)) for i in range(400)]
        assert first_alike(requests) == (299, True)

    def test_no_turn_is_seen_in_traffic_that_stays_the_same(self) -> None:
        rng = np.random.default_rng(1)
        for _ in range(50):
            lengths = rng.lognormal(6, 1, 400)
            assert not first_alike([past(i / 10, int(n) + 1) for i, n in enumerate(lengths)])[1]


class TestFrozenModel:
    def test_it_predicts_as_the_model_did_and_does_not_learn(self) -> None:

        model = OnlineModel(make_model())
        shape = BatchShape()
        shape.add(512, 0)
        for _ in range(50):
            model.observe(shape, 2 * model.base.predict(shape))
        copy = frozen(model)
        then_s, upper_s = model.predict(shape), model.predict_upper(shape)
        for _ in range(50):
            model.observe(shape, model.base.predict(shape))
            copy.observe(shape, model.base.predict(shape))
        assert (copy.predict(shape), copy.predict_upper(shape)) == (then_s, upper_s)
        assert model.predict(shape) < then_s

    def test_a_model_that_never_learns_is_its_own_copy(self) -> None:
        model = make_model()
        assert frozen(model) is model

    def test_its_steps_to_come_are_those_that_it_predicts(self) -> None:
        model = OnlineModel(make_model())
        shape = BatchShape()
        shape.add_decodes([100, 900, 2000])
        model.observe(shape, 1.3 * model.base.predict(shape))
        copy = frozen(model)
        assert is_unchanging(copy)
        assert not is_unchanging(model)
        end_s = 5.0
        for ends_s in copy.decode_ends(shape, end_s, 40, math.inf):
            end_s += copy.predict(shape)
            assert ends_s == end_s
            shape.lengthen_contexts()


def hurried(num_requests: int, rate: float) -> Trace:
    """Return prompts of which a tenth ask for tokens as fast as the device is for one alone."""
    rng = np.random.default_rng(3)
    requests = [
        TraceRequest(
            f"r{i}",
            i / rate,
            int(rng.integers(200, 2000)),
            int(rng.integers(50, 150)),
            SLO(1.0, 0.0065 if i % 10 == 3 else 0.05),
        )
        for i in range(num_requests)
    ]
    return Trace.of(requests, "hurried")


def good_share(requests: list[Request]) -> float:
    records = [RequestRecord.from_request(r) for r in requests]
    return sum(is_good(r, DeadlineRule.MEAN_TPOT) for r in records) / len(records)


class TestInTheSimulator:
    def test_it_leaves_a_candidate_that_overload_paralyses(self) -> None:
        """First come, first served keeps everybody waiting once more arrive than can be served."""
        model = load_model("h100/llama-3.1-8b")
        trace = hurried(400, rate=50)
        config = SimulationConfig(disturbances=Disturbances(noise=0.05), online=True)
        alone = good_share(simulate(trace, FCFS(), model, config))
        portfolio = make_policy("portfolio:every_s=2,delay_s=0.5|fcfs|edf:drop=infeasible")
        assert isinstance(portfolio, Portfolio)
        chosen = good_share(simulate(trace, portfolio, model, config))
        assert portfolio.num_changes == 1
        assert portfolio.current == "edf:drop=infeasible"
        assert chosen > alone + 0.1

    def test_the_same_replay_makes_the_same_choices_and_the_next_one_begins_anew(self) -> None:
        model = load_model("h100/llama-3.1-8b")
        trace = hurried(100, rate=16)
        portfolio = make_policy(SPECS)
        assert isinstance(portfolio, Portfolio)
        first = [r.token_times_s for r in simulate(trace, portfolio, model)]
        evaluations = list(portfolio.evaluations)
        assert evaluations
        assert [r.token_times_s for r in simulate(trace, portfolio, model)] == first
        assert list(portfolio.evaluations) == evaluations

    def test_groups_of_decodes_change_nothing(self) -> None:
        model = load_model("h100/llama-3.1-8b")
        trace = hurried(100, rate=16)
        config = SimulationConfig(disturbances=Disturbances(noise=0.05), online=True)
        in_groups = simulate(trace, make_policy(SPECS), model, config)
        one_by_one = simulate(trace, make_policy(SPECS), model, config, on_step=lambda _: None)
        assert [r.token_times_s for r in in_groups] == [r.token_times_s for r in one_by_one]

    def test_a_portfolio_inside_a_wrapper_is_found(self) -> None:
        wrapped = make_policy("portfolio|fcfs|edf+early_rejection")
        found = portfolio_in(wrapped)
        assert found is not None
        assert list(found.candidates) == ["fcfs", "edf"]
        assert portfolio_in(make_policy("edf+early_rejection")) is None

    @pytest.mark.parametrize("overlap", [False, True])
    def test_it_asks_also_where_steps_overlap(self, overlap: bool) -> None:
        model = load_model("h100/llama-3.1-8b")
        portfolio = make_policy(SPECS)
        assert isinstance(portfolio, Portfolio)
        simulate(hurried(80, rate=16), portfolio, model, SimulationConfig(overlap=overlap))
        assert portfolio.num_evaluations
