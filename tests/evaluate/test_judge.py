"""The judge: its intervals, its stops, and bouts between real policies on tiny windows."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from slosched.cli.judge_report import rows, scenario_table, sentence
from slosched.core import SchedulerOutput, SchedulerView
from slosched.evaluate.capacity import CapacityError, local_pool
from slosched.evaluate.capacity.pool import give
from slosched.evaluate.judge import (
    Contender,
    Judge,
    Scenario,
    TimeLimit,
    Verdict,
    scenarios,
    time_limit,
    work,
)
from slosched.evaluate.judge.bout import Bout
from slosched.evaluate.judge.knee import find_knees
from slosched.evaluate.judge.play import Stage, Task, share_good
from slosched.evaluate.judge.scenarios import known_knees
from slosched.evaluate.judge.sequential import LOOKS, FloatArray, ratio_interval, ratio_of_means
from slosched.evaluate.judge.time_limit import NO_LIMIT, OutOfTimeError, StuckPolicyError
from slosched.evaluate.statistics import Interval
from slosched.metrics import RequestColumns, good_requests, records_of
from slosched.perfmodel import load_model
from slosched.policy.fcfs import FCFS
from slosched.policy.spec import make_policy
from slosched.simulator.simulate import simulate
from slosched.workload import synthesize

Draw = Callable[[np.random.Generator, int], FloatArray]
SHARES = np.array([0.80, 0.82, 0.79, 0.81, 0.80, 0.83])


def alike(rng: np.random.Generator, size: int) -> FloatArray:
    return rng.normal(0.7, 0.02, size)


def skewed(rng: np.random.Generator, size: int) -> FloatArray:
    return 0.95 - rng.exponential(0.05, size)


def nearly_all(rng: np.random.Generator, size: int) -> FloatArray:
    return rng.binomial(400, 0.97, size) / 400


def always_covered(draw: Draw, errors: list[float], trials: int = 400) -> float:
    """Return the share of trials in which the intervals of all looks hold the true ratio, 1."""
    rng = np.random.default_rng(7)
    held = 0
    for _ in range(trials):
        mine, theirs = draw(rng, LOOKS[-1].num_windows), draw(rng, LOOKS[-1].num_windows)
        intervals = [
            ratio_interval(mine[: look.num_windows], theirs[: look.num_windows], error)
            for look, error in zip(LOOKS, errors, strict=True)
        ]
        held += all(1.0 in interval for interval in intervals)
    return held / trials


class TestInterval:
    def test_the_errors_of_all_looks_add_up_to_5_percent(self) -> None:
        assert sum(look.error for look in LOOKS) == pytest.approx(0.05)

    @pytest.mark.parametrize("draw", [alike, skewed, nearly_all])
    def test_all_looks_together_hold_the_truth_in_95_of_100_trials(self, draw: Draw) -> None:
        assert always_covered(draw, [look.error for look in LOOKS]) >= 0.94

    def test_ordinary_intervals_would_not(self) -> None:
        assert always_covered(alike, [0.05] * len(LOOKS)) < 0.92

    def test_what_two_have_in_common_cancels(self) -> None:
        weather = np.array([0.1, -0.2, 0.0, 0.15, -0.1, 0.05])
        paired = ratio_interval(SHARES + weather, SHARES * 0.9 + weather, 0.05)
        apart = ratio_interval(SHARES + weather, SHARES * 0.9 + weather[::-1], 0.05)
        assert paired.high - paired.low < 0.7 * (apart.high - apart.low)

    def test_a_policy_is_level_with_itself(self) -> None:
        assert ratio_interval(SHARES, SHARES, 0.01) == (1.0, 1.0)
        rarely = np.array([0.0, 0.0, 0.01, 0.0, 0.0, 0.3])
        assert ratio_interval(rarely, rarely, 0.01) == (1.0, 1.0)

    def test_of_a_rival_that_serves_nothing_there_is_no_upper_end(self) -> None:
        nothing = np.zeros(6)
        assert ratio_of_means(SHARES, nothing) == math.inf
        assert ratio_interval(SHARES, nothing, 0.01) == (math.inf, math.inf)
        almost = np.array([0.0, 0.001, 0.0, 0.0, 0.0, 0.0])
        low, high = ratio_interval(SHARES, almost, 0.01)
        assert low > 100
        assert high == math.inf
        assert math.isnan(ratio_of_means(nothing, nothing))
        assert ratio_interval(nothing, nothing, 0.01) == (1.0, 1.0)
        assert ratio_interval(nothing, almost, 0.01) == (0.0, math.inf)

    def test_it_holds_the_ratios_that_a_paired_t_test_does_not_reject(self) -> None:
        rng = np.random.default_rng(3)
        mine, theirs = rng.normal(0.8, 0.05, 6), rng.normal(0.7, 0.05, 6)
        for end in ratio_interval(mine, theirs, 0.05):
            left = mine - end * theirs
            t = abs(left.mean()) / (left.std(ddof=1) / math.sqrt(6))
            assert t == pytest.approx(2.5706, abs=1e-3), "Student's quantile of 5 degrees, 2.5 %"


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (1.01, 1.3, Verdict.AHEAD),
        (0.7, 0.99, Verdict.BEHIND),
        (0.99, 1.01, Verdict.LEVEL),
        (1.001, 1.01, Verdict.LEVEL),
        (0.97, 1.01, Verdict.NOT_SURE),
        (0.0, math.inf, Verdict.NOT_SURE),
        (math.inf, math.inf, Verdict.AHEAD),
    ],
)
def test_verdicts(low: float, high: float, verdict: Verdict) -> None:
    assert Verdict.of(Interval(low, high)) is verdict


class TestBout:
    MINE, WEAK, TWIN = Contender("mine"), Contender("weak"), Contender("twin")

    def bout(self, max_windows: float = math.inf) -> Bout:
        rivals = {"weak": self.WEAK, "twin": self.TWIN}
        return Bout("s", 1.0, 5.0, self.MINE, rivals, max_windows)

    def play(self, bout: Bout, noise: float) -> int:
        """Play the next look; return the number of replays that it took."""
        rng = np.random.default_rng(bout.num_looks)
        tasks = list(bout.tasks())
        mean = {self.MINE: 0.8, self.WEAK: 0.4, self.TWIN: 0.8}
        took = [bout.take(t, mean[t.contender] + noise * rng.normal()) for t in tasks]
        assert took == [*[False] * (len(tasks) - 1), True]
        return len(tasks)

    def test_a_rival_with_a_clear_answer_plays_no_more(self) -> None:
        bout = self.bout()
        first, second = LOOKS[0].num_windows, LOOKS[1].num_windows
        assert self.play(bout, 0.05) == 3 * first
        assert bout.answers["weak"].verdict is Verdict.AHEAD
        assert bout.undecided == ["twin"]
        assert self.play(bout, 0.05) == 2 * (second - first)
        assert bout.answers["weak"].num_windows == first

    def test_it_ends_when_all_answers_are_clear(self) -> None:
        bout = self.bout()
        self.play(bout, 1e-6)
        assert bout.answers["twin"].verdict is Verdict.LEVEL
        assert (bout.look, bout.num_left(), list(bout.tasks())) == (None, 0, [])

    def test_it_ends_after_the_last_look(self) -> None:
        bout = self.bout()
        for _ in LOOKS:
            self.play(bout, 0.3)
        assert bout.look is None
        assert bout.answers["twin"].num_windows == LOOKS[-1].num_windows

    def test_it_ends_where_there_are_no_more_windows(self) -> None:
        bout = self.bout(max_windows=LOOKS[1].num_windows - 1)
        assert bout.num_left() == 3 * LOOKS[0].num_windows
        self.play(bout, 0.3)
        assert bout.look is None

    def test_a_policy_that_is_its_own_rival_plays_once(self) -> None:
        bout = Bout("s", 1.0, 5.0, self.MINE, {"it": self.MINE}, math.inf)
        assert len(list(bout.tasks())) == LOOKS[0].num_windows


def tiny(name: str = "conv-tight") -> dict[str, Scenario]:
    """Return a scenario with windows of 80 requests."""
    return {name: replace(scenarios()[name], size_factor=0.1)}


class TestJudge:
    def test_between_real_policies(self) -> None:
        rivals = {"itself": Contender("sjf:drop=infeasible"), "fcfs": Contender("fcfs")}
        judge = Judge(Contender("sjf:drop=infeasible"), tiny(), rivals)
        seen: list[tuple[int, int]] = []
        judge.run(local_pool(1), NO_LIMIT, lambda done, left: seen.append((done, left)))
        assert not judge.is_out_of_time
        found = {(row["load"], row["against"]): row for row in rows(judge)}
        assert len(found) == 4
        for load in (1.0, 2.0):
            itself = found[load, "itself"]
            assert (itself["verdict"], itself["num_windows"]) == ("level", LOOKS[0].num_windows)
            assert itself["ratio"] == 1.0
            assert itself["share_good"] == found[load, "fcfs"]["share_good"] or (
                found[load, "fcfs"]["num_windows"] != itself["num_windows"]
            )
        assert found[2.0, "fcfs"]["verdict"] == "ahead"
        assert "ahead of (in every scenario) fcfs" in sentence(judge)
        assert "level with itself" in sentence(judge)
        assert seen[-1][1] == 0

    def test_before_all_scenarios_are_played_it_says_how_many_are(self) -> None:
        rivals = {"fcfs": Contender("fcfs")}
        judge = Judge(Contender("sjf:drop=infeasible"), tiny(), rivals)
        judge.run(local_pool(1), NO_LIMIT, lambda _done, _left: None)
        judge.bouts += [replace(bout, scenario="another", answers={}) for bout in judge.bouts]
        assert "ahead of (in 1 of 1 played so far) fcfs" in sentence(judge)

    def test_rivals_of_one_name_are_told_apart(self) -> None:
        rivals = {"with dropping": Contender("fcfs:drop=expired"), "plain": Contender("fcfs")}
        judge = Judge(Contender("goodput"), tiny(), rivals)
        judge.knees = {"conv-tight": 5.0}
        judge.bouts = [Bout("conv-tight", 1.0, 5.0, Contender("goodput"), rivals, math.inf)]
        shown = list(scenario_table(judge).columns[1].cells)
        assert shown == ["fcfs:drop=expired", "fcfs"]

    def test_the_same_input_gives_the_same_answers(self) -> None:
        def answers() -> list[dict[str, object]]:
            judge = Judge(Contender("fcfs"), tiny(), {"itself": Contender("fcfs")})
            judge.run(local_pool(1), NO_LIMIT, lambda _done, _left: None)
            return rows(judge)

        assert answers() == answers()

    def test_out_of_time_it_says_so(self) -> None:
        judge = Judge(Contender("fcfs"), tiny())
        judge.run(local_pool(1), TimeLimit.from_now(0.0), lambda _done, _left: None)
        assert judge.is_out_of_time
        assert "no verdict yet" in sentence(judge)

    @pytest.mark.parametrize("limit_s", [5.0, 40.0])  # while the knee is looked for, and later
    def test_it_stops_when_the_time_is_over(
        self, limit_s: float, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """On this clock a replay takes a second."""
        now_s = 0.0

        class Counting(Executor):
            def __init__(self, initialize: Callable[[], None]) -> None:
                self.inner = local_pool(1)(initialize)

            def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
                nonlocal now_s
                now_s += 1.0
                return self.inner.submit(fn, *args, **kwargs)

        for module in (time_limit, work):
            monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now_s))
        judge = Judge(Contender("fcfs"), tiny())
        judge.run(Counting, TimeLimit.from_now(limit_s), lambda _done, _left: None)
        assert judge.is_out_of_time
        assert now_s == limit_s
        assert bool(judge.bouts) == (limit_s > 10)

    @pytest.mark.parametrize("num_requests", [1, 500])
    def test_a_trace_that_is_too_short_is_refused(self, num_requests: int) -> None:
        trace = synthesize("poisson", num_requests=num_requests)
        with pytest.raises(CapacityError, match="too short to judge on: conv-tight needs 6"):
            Judge(Contender("fcfs"), tiny(), None, trace)

    def test_windows_of_a_trace_share_no_request(self) -> None:
        (scenario,) = tiny().values()
        trace = synthesize("poisson", num_requests=2000)
        count = int(scenario.num_windows(trace))
        parts = [scenario.window(number, 1.0, trace) for number in range(count + 3)]
        names = [request.request_id for part in parts for request in part.requests]
        assert len(set(names)) == len(names) == 2000

    def test_in_a_closed_loop_the_same_requests_count_for_every_policy(self) -> None:
        trace = synthesize("sessions", num_requests=1500, rate=2.0).closed_loop(0.03)
        stage = Stage(tiny(), trace)
        scenario, player = stage.scenarios["conv-tight"], Contender("fcfs")
        window = scenario.window(0, 100.0, trace)
        config = scenario.config(player, 0)
        requests = simulate(window, make_policy(player.policy), scenario.device(), config)
        counted = {request.request_id for request in window.requests[40:]}
        records = records_of([r for r in requests if r.request_id in counted], scenario.rule)
        share = good_requests(RequestColumns.of(records), scenario.rule).mean()
        give(stage)
        assert share_good(Task("conv-tight", 100.0, 0, player)) == share


class Endless(FCFS):
    """Its first call does not return, whatever is raised in it."""

    def schedule(self, view: SchedulerView) -> SchedulerOutput:
        for now_s in iter(time.monotonic, None):
            with suppress(Exception):
                self.last_s = now_s
        return super().schedule(view)


class Slow(FCFS):
    def schedule(self, view: SchedulerView) -> SchedulerOutput:
        time.sleep(0.05)
        return super().schedule(view)


class TestTimeLimit:
    @pytest.fixture(autouse=True)
    def short(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(time_limit, "CALL_TIME_S", 0.5)

    def replay(self, policy: FCFS) -> None:
        simulate(synthesize("poisson", num_requests=1000), policy, load_model("h100/llama-3.1-8b"))

    def test_a_call_that_does_not_return_is_an_error_that_says_where_it_is(self) -> None:
        limit = TimeLimit.from_now(0.3)
        with (
            pytest.raises(StuckPolicyError, match=r"endless\.py .* limit of 0\.3 s") as caught,
            limit.ending("endless.py"),
        ):
            self.replay(Endless())
        assert any(frame.name == "schedule" for frame in caught.traceback)
        assert time.monotonic() >= limit.end_s + 0.5

    def test_many_calls_of_a_slow_policy_are_given_up_as_soon_as_one_returns(self) -> None:
        limit = TimeLimit.from_now(0.3)
        with pytest.raises(OutOfTimeError), limit.ending("slow.py"):
            self.replay(Slow())

    def test_a_finaliser_is_not_interrupted_since_python_would_ignore_the_error(self) -> None:
        limit = TimeLimit.from_now(0.1)

        class SlowToGo:
            def __del__(self) -> None:
                while not limit.is_over():
                    pass
                time.sleep(0.15)  # another look, and a warning that fails this test

        def go_slowly() -> None:
            SlowToGo()
            time.sleep(1.0)

        with pytest.raises(OutOfTimeError), limit.ending("any.py"):
            go_slowly()

    def test_what_ends_in_time_goes_on_undisturbed(self) -> None:
        before = signal.getsignal(signal.SIGALRM)
        with TimeLimit.from_now(0.3).ending("quick.py"):
            pass
        assert signal.getsignal(signal.SIGALRM) is before
        time.sleep(0.4)

    def test_nothing_begins_after_the_end(self) -> None:
        begun = False
        with pytest.raises(OutOfTimeError), TimeLimit.from_now(0.0).ending("late.py"):
            begun = True
        assert not begun


def test_every_finalist_is_a_policy_and_every_scenario_has_one_of_each_class() -> None:
    for scenario in scenarios().values():
        assert list(scenario.finalists) == ["ours", "published", "with dropping", "plain"]
        for contender in scenario.finalists.values():
            make_policy(contender.policy)
            config = scenario.config(contender, seed=1)
            assert all(getattr(config.limits, name) == v for name, v in contender.limits)


def test_the_knee_of_every_scenario_is_known() -> None:
    assert list(known_knees()) == list(scenarios())


@pytest.mark.slow  # it takes minutes, for which the knees are kept
def test_the_known_knees_are_found_again() -> None:
    every = scenarios()
    with local_pool()(partial(give, Stage(every))) as pool:
        assert find_knees(every, None, pool, NO_LIMIT) == known_knees()


def test_scenarios_as_they_are_need_no_search_for_the_knee() -> None:
    (name, scenario), *_ = scenarios().items()
    judge = Judge(Contender("fcfs"), {name: scenario})
    judge.run(local_pool(1), TimeLimit.from_now(0.0), lambda _done, _left: None)
    assert judge.knees == {name: known_knees()[name]}
    assert [bout.load for bout in judge.bouts] == [1.0, 2.0]
