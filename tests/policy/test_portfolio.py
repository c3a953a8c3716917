"""A portfolio: when it asks, when it goes over to another candidate, and what it leaves behind."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
from factories import make_model

from slosched.core import SLO, Request, RequestStatus, SchedulerView
from slosched.kv import KVCache
from slosched.policy.edf import EDF
from slosched.policy.fcfs import FCFS
from slosched.policy.portfolio.evaluation import Evaluation, Reason
from slosched.policy.portfolio.occasion import Occasions
from slosched.policy.portfolio.policy import Portfolio
from slosched.policy.portfolio.question import Answer, PastRequest, Question
from slosched.policy.portfolio.scores import Scores
from slosched.policy.portfolio.seen import Seen, Trouble
from slosched.policy.spec import PolicySpecError, make_policy, policy_classes, with_options
from slosched.scheduler import Scheduler

RULE = Scheduler(FCFS(), KVCache(8)).limits.deadline_rule
MODEL = make_model()


@dataclass
class Scripted:
    """A forecaster that gives the same answer to every question, or never any."""

    good: dict[str, tuple[bool, ...]] | None
    has_turned: bool = False
    is_busy: bool = False
    questions: list[Question] = field(default_factory=list)

    def ask(self, question: Question) -> bool:
        self.questions.append(question)
        return True

    def take_answer(self) -> Answer | None:
        if self.is_busy or self.good is None:
            return None
        return Answer(self.good, num_unjudged=0, has_turned=self.has_turned, cpu_s=0.5)


def portfolio_of_two(forecaster: Scripted, **options: float) -> Portfolio:
    candidates = {"fcfs": FCFS(), "edf": EDF()}
    options = {"effort": 100.0, "window_s": 4.0, **options}
    portfolio = Portfolio(every_s=1.0, delay_s=0.5, candidates=candidates, **options)  # type: ignore[arg-type]
    portfolio.forecast_with(forecaster)
    return portfolio


def shares(fcfs: float, edf: float) -> dict[str, tuple[bool, ...]]:
    """Return verdicts on 800 requests of which these shares are good, spread evenly."""

    def verdicts(share: float) -> tuple[bool, ...]:
        return tuple(math.floor(share * (i + 1)) > math.floor(share * i) for i in range(800))

    return {"fcfs": verdicts(fcfs), "edf": verdicts(edf)}


def overdue(arrival_s: float = 0.0) -> Request:
    """Return a waiting request whose first token was due 50 ms after its arrival."""
    request = Request(f"r{arrival_s}", arrival_s, 8, 16, SLO(0.05, 0.05))
    request.deadline_s = RULE.next_deadline_s(request)
    return request


def view(now_s: float, *waiting: Request) -> SchedulerView:
    scheduler = Scheduler(FCFS(), KVCache(64), latency_model=make_model())
    for request in waiting:
        scheduler.queues.waiting[request.request_id] = request
    return scheduler.view(now_s)


def play(portfolio: Portfolio, until_s: float = 3.0) -> None:
    """Let a request arrive ten times a second, each of which is overdue soon."""
    requests = [overdue(i / 10) for i in range(round(10 * until_s) + 1)]
    for i in range(len(requests)):
        portfolio.schedule(view(i / 10, *requests[: i + 1]))


def test_the_first_candidate_plans_while_nobody_simulates() -> None:
    portfolio = Portfolio(candidates={"fcfs": FCFS(), "edf": EDF()})
    play(portfolio)
    assert portfolio.current == "fcfs"
    assert not portfolio.evaluations


def test_it_goes_over_to_a_candidate_that_is_surely_better_and_leaves_a_record() -> None:
    portfolio = portfolio_of_two(Scripted(shares(fcfs=0.5, edf=0.9)))
    play(portfolio)
    first = portfolio.evaluations[0]
    assert (first.before, first.chosen, first.reason) == ("fcfs", "edf", Reason.BETTER)
    assert (first.asked_s, first.counted_s) == pytest.approx((1.0, 1.5))
    assert first.scores["edf"].lead == pytest.approx(0.4, abs=0.01)
    assert first.scores["edf"].lead_low > 0
    assert portfolio.current == "edf"
    assert portfolio.num_changes == 1
    assert portfolio.cpu_s == 0.5 * len(portfolio.evaluations)


def test_it_stays_where_the_other_is_ahead_by_too_little() -> None:
    portfolio = portfolio_of_two(Scripted(shares(fcfs=0.9, edf=0.92)), min_gain=0.05)
    play(portfolio)
    assert portfolio.current == "fcfs"
    assert {e.reason for e in portfolio.evaluations} == {Reason.UNSURE}


def test_it_stays_where_the_lead_comes_from_a_single_burst() -> None:
    """An eighth of the requests in a row is one block of eight, which may be chance."""
    burst = {"fcfs": (False,) * 100 + (True,) * 700, "edf": (True,) * 800}
    portfolio = portfolio_of_two(Scripted(burst))
    play(portfolio, until_s=1.6)
    (evaluation,) = portfolio.evaluations
    assert evaluation.scores["edf"].lead == pytest.approx(1 / 8)
    assert evaluation.reason is Reason.UNSURE


def test_it_stays_until_what_was_judged_is_more_than_a_burst() -> None:
    """An eighth of 20 s: the answer to the question at 2 s is about less, that at 3 s is not."""
    portfolio = portfolio_of_two(Scripted(shares(fcfs=0.8, edf=0.9)), window_s=20.0)
    play(portfolio, until_s=6.0)
    first, *_, last = portfolio.evaluations
    assert (first.reason, last.chosen) == (Reason.UNSURE, "edf")
    assert all(e.asked_s < 2.5 for e in portfolio.evaluations if e.reason is Reason.UNSURE)
    assert portfolio.num_changes == 1


def test_a_burst_is_enough_where_most_of_it_is_bad() -> None:
    portfolio = portfolio_of_two(Scripted(shares(fcfs=0.4, edf=0.5)), window_s=400.0)
    play(portfolio, until_s=1.6)
    assert [e.reason for e in portfolio.evaluations] == [Reason.BETTER]


def test_as_many_arrivals_as_are_looked_at_are_no_burst() -> None:
    portfolio = portfolio_of_two(
        Scripted(shares(fcfs=0.8, edf=0.9)), window_s=400.0, max_requests=24
    )
    play(portfolio, until_s=6.0)
    assert portfolio.current == "edf"


def test_too_few_requests_decide_nothing() -> None:
    portfolio = portfolio_of_two(Scripted({}))
    play(portfolio)
    assert {e.reason for e in portfolio.evaluations} == {Reason.TOO_FEW}


def test_nothing_is_asked_while_all_is_well() -> None:
    forecaster = Scripted(shares(0.5, 0.9))
    portfolio = portfolio_of_two(forecaster)
    fine = overdue()
    fine.deadline_s = 100.0
    for i in range(50):
        portfolio.schedule(view(i / 10, fine))
    assert not forecaster.questions


def test_the_time_to_the_next_question_doubles_while_nothing_changes() -> None:
    portfolio = portfolio_of_two(Scripted(shares(fcfs=0.0, edf=0.0)))
    play(portfolio, until_s=16.0)
    asked_s = [e.asked_s for e in portfolio.evaluations]
    assert asked_s == pytest.approx([1.0, 3.0, 7.0, 15.0])


def test_a_surprise_is_followed_up_at_once() -> None:
    """The answer foretold that nothing would be late, but every request that comes is."""
    portfolio = portfolio_of_two(Scripted(shares(fcfs=1.0, edf=1.0)))
    requests = [overdue(i / 10) for i in range(60)]
    for i in range(60):
        portfolio.schedule(view(i / 10 + 0.01, *requests[: i + 1]))
    assert [e.asked_s for e in portfolio.evaluations] == pytest.approx(
        [1.01, 2.01, 3.01, 4.01, 5.01], abs=0.02
    )


def test_a_loser_is_left_out_of_the_next_questions() -> None:
    """Shortest first wins in one block what it loses in another: it may be better."""
    good = shares(fcfs=0.5, edf=0.1)
    sjf = [True] * 20 + list(good["fcfs"][20:-20]) + [False] * 20
    forecaster = Scripted({**good, "sjf": tuple(sjf)})
    portfolio = portfolio_of_two(forecaster)
    portfolio.candidates = {**portfolio.candidates, "sjf": make_policy("sjf")}
    play(portfolio, until_s=40.0)
    candidates = [question.candidates for question in forecaster.questions]
    assert candidates[:2] == [("fcfs", "edf", "sjf"), ("fcfs", "sjf")]
    assert forecaster.questions[1].eliminated == ("edf",)
    assert candidates[4] == ("fcfs", "edf", "sjf")


def test_all_are_asked_again_when_all_others_have_lost() -> None:
    forecaster = Scripted(shares(fcfs=0.9, edf=0.1))
    play(portfolio_of_two(forecaster), until_s=10.0)
    assert [question.candidates for question in forecaster.questions[:2]] == [("fcfs", "edf")] * 2


def test_a_question_is_paid_for_by_the_arrivals_since_the_one_before() -> None:
    """Ten arrive in a second, and two candidates replay all that have arrived.

    More are late than foretold, so that four arrivals may be replayed for each new one.
    """
    forecaster = Scripted(shares(fcfs=0.99, edf=0.99))
    portfolio = portfolio_of_two(forecaster, effort=1.0)
    play(portfolio, until_s=12.0)
    asked_at = [len(question.requests) for question in forecaster.questions]
    assert asked_at == [11, 31, 71]


def test_a_promise_that_cannot_be_kept_is_no_trouble() -> None:
    forecaster = Scripted(shares(0.5, 0.9))
    portfolio = portfolio_of_two(forecaster)
    impossible = Request("r", 0.0, 8, 16, SLO(1e-6, 0.05))
    impossible.deadline_s = RULE.next_deadline_s(impossible)
    for i in range(50):
        portfolio.schedule(view(i / 10, impossible))
    assert not forecaster.questions


def test_a_candidate_that_dropped_out_is_compared_on_what_it_replayed() -> None:
    """The first half went better for all: the shares themselves are not comparable."""
    scores = Scores()
    fcfs = (1.0,) * 400 + (0.5,) * 400
    scores.add({"fcfs": fcfs, "edf": (0.9,) * 400})
    assert scores.lead("edf", "fcfs").mean == pytest.approx(-0.1)
    assert scores.losers("fcfs", 0.005) == ("edf",)


def test_former_scores_count_until_the_traffic_turns() -> None:
    scores = Scores()
    scores.add(shares(fcfs=0.2, edf=0.8))
    scores.add(shares(fcfs=0.6, edf=0.6))
    assert 0 < scores.lead("edf", "fcfs").mean < 0.6
    scores.forget()
    scores.add(shares(fcfs=0.6, edf=0.6))
    assert scores.lead("edf", "fcfs").mean == 0


def test_an_answer_that_never_comes_is_given_up_when_nobody_works_on_it() -> None:
    forecaster = Scripted(None, is_busy=True)
    portfolio = portfolio_of_two(forecaster)
    play(portfolio, until_s=5.0)
    assert not portfolio.evaluations
    forecaster.is_busy = False
    portfolio.schedule(view(5.2, overdue()))
    assert portfolio.evaluations[-1].reason is Reason.NO_ANSWER
    assert portfolio.current == "fcfs"


def test_reset_begins_anew_with_the_first_candidate() -> None:
    portfolio = portfolio_of_two(Scripted(shares(fcfs=0.5, edf=0.9)))
    play(portfolio)
    assert portfolio.current == "edf"
    portfolio.reset()
    assert (portfolio.current, len(portfolio.evaluations), portfolio.cpu_s) == ("fcfs", 0, 0.0)


def test_an_evaluation_survives_a_file() -> None:
    portfolio = portfolio_of_two(Scripted(shares(fcfs=0.5, edf=0.9)))
    play(portfolio)
    for evaluation in portfolio.evaluations:
        assert Evaluation.from_json(evaluation.as_json()) == evaluation


def described(seen: Seen, now_s: float, most: int) -> list[PastRequest]:
    """Return the requests of a window, described one at a time."""
    gathering = seen.gather(now_s, most, MODEL)
    while not gathering.describe(1):
        pass
    assert len(gathering) == len(gathering.requests)
    return gathering.requests


def test_no_step_describes_all_requests_of_a_question() -> None:
    """Describing a request takes microseconds: hundreds of them would delay a step."""
    forecaster = Scripted(shares(0.5, 0.9))
    portfolio = portfolio_of_two(forecaster)
    requests = [overdue(i / 1000) for i in range(300)]
    steps = 0
    while not forecaster.questions:
        portfolio.schedule(view(1.0 + steps / 1000, *requests))
        steps += 1
    assert len(forecaster.questions[0].requests) == 300
    assert steps > 4


def test_the_best_of_many_has_to_be_ahead_by_more() -> None:
    scores = Scores()
    uneven = {"fcfs": (False,) * 300 + (True,) * 500, "edf": (True,) * 700 + (False,) * 100}
    scores.add(uneven)
    of_two, of_nine = scores.lead("edf", "fcfs"), scores.lead("edf", "fcfs", 8)
    assert of_two.mean == of_nine.mean
    assert of_nine.low < of_two.low


class TestOccasions:
    TROUBLE = Trouble(num_bad=50, num_requests=100)

    def test_less_may_be_replayed_where_less_is_at_stake(self) -> None:
        few = Trouble(num_bad=1, num_requests=100)
        occasions = Occasions(every_s=1.0, effort=1.0)
        much = occasions.num_affordable(self.TROUBLE, 100, 0.0, is_surprise=False)
        assert occasions.num_affordable(few, 100, 0.0, is_surprise=False) == much / 5

    def test_without_a_limit_a_question_still_needs_a_new_arrival(self) -> None:
        occasions = Occasions(every_s=1.0, effort=math.inf)
        assert occasions.num_affordable(self.TROUBLE, 1, 0.0, is_surprise=True) == math.inf
        assert occasions.num_affordable(self.TROUBLE, 0, 0.0, is_surprise=True) == 0

    def test_what_was_paid_for_is_spent_unless_nothing_was_learnt(self) -> None:
        occasions = Occasions(every_s=1.0, effort=1.0)
        known = {"is_in_doubt": False, "has_changed": False}
        occasions.conclude(0.0, 100, is_blank=True, **known)
        assert occasions.num_affordable(self.TROUBLE, 150, 9.0, is_surprise=False) == 8 * 150
        occasions.conclude(9.0, 150, is_blank=False, **known)
        assert occasions.num_affordable(self.TROUBLE, 180, 9.5, is_surprise=False) == 0
        assert occasions.num_affordable(self.TROUBLE, 180, 99.0, is_surprise=False) == 30
        assert occasions.num_affordable(self.TROUBLE, 180, 9.5, is_surprise=True) == 4 * 30


class TestWhatWasSeen:
    def test_late_rejected_and_overdue_requests_are_in_trouble(self) -> None:
        seen = Seen(window_s=10.0)
        good, rejected, waiting, aborted = (overdue(i / 10) for i in range(4))
        seen.note([good, rejected, waiting, aborted])
        good.status, good.end_s, good.token_times_s = RequestStatus.FINISHED, 1.0, [0.0005]
        good.num_output_tokens = 1
        rejected.status, rejected.end_s = RequestStatus.REJECTED, 1.0
        aborted.status, aborted.end_s = RequestStatus.ABORTED, 1.0
        seen.update((), 1.0, RULE)
        assert seen.trouble(0.0, 1.0, MODEL) == Trouble(num_bad=2, num_requests=3)
        assert seen.output_lengths == (1,)

    def test_the_window_holds_what_arrived_in_it_and_what_ran_when_it_began(self) -> None:
        seen = Seen(window_s=10.0)
        running, over, new = overdue(0.0), overdue(1.0), overdue(12.0)
        seen.note([running, over, new])
        running.started_s, running.token_times_s = 0.0, [1.0, 6.0, 11.0]
        running.num_output_tokens = 3
        over.status, over.end_s = RequestStatus.REJECTED, 2.0
        seen.update((), 15.0, RULE)
        first, second = described(seen, 15.0, 100)
        assert (first.arrival_s, first.num_emitted_before, first.num_output_tokens) == (-12, 3, 3)
        assert (first.first_token_s, first.last_token_s) == (-11.0, -1.0)
        assert (second.arrival_s, second.num_emitted_before) == (0.0, 0)

    def test_only_the_latest_requests_are_in_a_full_window(self) -> None:
        seen = Seen(window_s=10.0)
        requests = [overdue(float(i)) for i in range(4)]
        for request in requests:
            seen.note([request])
            request.status, request.end_s = RequestStatus.REJECTED, request.arrival_s
        seen.update((), 4.0, RULE)
        assert [past.arrival_s for past in described(seen, 4.0, 2)] == [0.0, 1.0]

    def test_a_cached_prefix_shortens_the_prompt(self) -> None:
        seen = Seen(window_s=10.0)
        started, waiting = overdue(0.0), overdue(1.0)
        started.status, started.num_cached_tokens = RequestStatus.RUNNING, 3
        started.num_computed_tokens = 8
        waiting.num_computed_tokens = 5
        seen.note([started, waiting])
        assert [past.num_prompt_tokens for past in described(seen, 1.0, 2)] == [5, 3]


class TestItsSpec:
    def test_candidates_follow_after_bars(self) -> None:
        made = make_policy("portfolio:every_s=2|edf:token_budget=256|fcfs")
        candidates = {"edf:token_budget=256": EDF(token_budget=256), "fcfs": FCFS()}
        assert made == Portfolio(every_s=2.0, candidates=candidates)
        assert policy_classes("portfolio|edf|fcfs") == [Portfolio]

    def test_every_default_candidate_is_what_its_spec_makes(self) -> None:
        for spec, candidate in Portfolio().candidates.items():
            assert make_policy(spec) == candidate

    def test_other_options_keep_the_candidates(self) -> None:
        changed = with_options("portfolio:every_s=2|edf|fcfs", {"window_s": "9"})
        assert changed == "portfolio:every_s=2,window_s=9|edf|fcfs"

    @pytest.mark.parametrize(
        ("spec", "message"),
        [
            ("edf|fcfs", "put portfolio before the bars, as in portfolio|edf|fcfs"),
            ("portfolio|portfolio", "must not be a portfolio itself"),
            ("portfolio|edff", "no policy 'edff'"),
            ("portfolio:every_s=0", "every_s must be positive"),
        ],
    )
    def test_an_error_says_what_is_wrong(self, spec: str, message: str) -> None:
        with pytest.raises(PolicySpecError) as caught:
            make_policy(spec)
        assert message in str(caught.value)
