"""Several policies, of which the one plans that would have served the traffic of late best."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from slosched.core import (
    DecodeGroup,
    DraftOffer,
    ForeseesDecodes,
    Limits,
    PlansBesideDecodes,
    Policy,
    PromptOrder,
    SchedulerOutput,
    SchedulerView,
    tunable,
)
from slosched.perfmodel.frozen import frozen
from slosched.policy.edf import EDF
from slosched.policy.goodput import Goodput
from slosched.policy.kit.checks import check_at_least, check_positive, check_share
from slosched.policy.kit.deadlines import Deadlines
from slosched.policy.kit.drop import Drop
from slosched.policy.portfolio.evaluation import Evaluation, Reason, Score
from slosched.policy.portfolio.question import (
    Answer,
    AsksForecaster,
    Forecaster,
    Question,
    asking_in,
)
from slosched.policy.portfolio.scores import LEAST_JUDGED, Scores
from slosched.policy.portfolio.seen import Seen, Trouble
from slosched.policy.published.qoserve import QoServe
from slosched.policy.published.slidebatching import SlideBatching
from slosched.policy.slo_aware import LateRule, SLOAware

_ASK_AGAIN_S = 0.1
"""Time between two looks for an answer that is overdue."""
_ALL_AGAIN = 4
"""One evaluation in so many replays all candidates, the eliminated ones included."""
_LONGEST_INTERVAL = 8
"""Longest time between evaluations that change nothing, as a multiple of `every_s`."""
_HASTE = 4.0
"""Factor on the effort when the next question is urgent."""
_MOST_EVALUATIONS = 10_000
"""Evaluations whose records are kept."""


def default_candidates() -> dict[str, Policy]:
    """Return the candidates of a portfolio that names none, by their specs."""
    return {
        "goodput": Goodput(),
        "goodput:margin=0.1": Goodput(margin=0.1),
        "edf:token_budget=512,drop=infeasible": EDF(token_budget=512, drop=Drop.INFEASIBLE),
        "edf:token_budget=2048,drop=infeasible": EDF(token_budget=2048, drop=Drop.INFEASIBLE),
        "slidebatching:deadlines=run,drop=infeasible": SlideBatching(
            deadlines=Deadlines.RUN, drop=Drop.INFEASIBLE
        ),
        "qoserve:drop=infeasible": QoServe(drop=Drop.INFEASIBLE),
        "slo_aware:late=bind": SLOAware(late=LateRule.BIND),
    }


@dataclass
class Portfolio(PlansBesideDecodes, ForeseesDecodes, AsksForecaster):
    """The candidate that would have served the requests of late best, found by simulation.

    1. One candidate plans every step, at first the first.
    2. Every `every_s` the policy looks at the requests of the last `window_s`.  If more than
       `trouble` of them were rejected, late or overdue though their promise could be kept, it asks
       the simulator: how would each candidate have served these requests, on this replica,
       beginning with the decodes that ran then?  Lengths of outputs that are still to come are
       drawn from finished requests, and arrivals that span less than half of `window_s` are
       repeated, since what they bring about may take that long to show.
    3. Candidates replay side by side.  One that surely gains less than `min_gain` against the best
       drops out, and the replays end when only the candidate that plans is left.
    4. `delay_s` later the answer counts.  The candidate that is ahead takes over if its lead is
       surely above zero (`scores`) and at least `min_gain`.
    5. The time to the next question doubles while nothing is gained, up to eight times `every_s`.
       More requests in trouble than the last answer foretold end it.  And a question has to be
       paid for: `effort` replayed arrivals for each one since the last question, and four times
       as many while there is more trouble than foretold or a lead that is not sure.
    6. A candidate that dropped out is left out of three evaluations in four, and a lead that is not
       sure is followed up with these two alone.  If the simulator finds that the traffic has turned
       within the window (prompt lengths or promises), only what arrived since is judged, former
       scores are forgotten, and all candidates are replayed.

    The policy knows no device, no promise and no regime; it only compares.  A candidate is reset
    when it takes over, and has to serve requests that another one began.

    Who simulates is handed in by `forecast_with`.  Without that the first candidate plans for ever.

    Source: portfolio scheduling (Deng, Song, Ren and Iosup, SC '13), which simulates a portfolio
    of policies online and applies the best to batch jobs in clouds.  Its selection by utility and
    time budget is left out; the test by pairs and blocks, the elimination and the detection of
    turns are ours.
    """

    every_s: float = tunable(5.0, 10.0)
    """Time between two evaluations."""
    window_s: float = tunable(40.0, 20.0, 80.0)
    """Time over which arrivals are replayed."""
    max_requests: int = 800
    """Largest number of arrivals that are replayed: the latest ones."""
    delay_s: float = 1.0
    """Time from a question until its answer counts, so that replays on a server have time."""
    trouble: float = 0.005
    """Share of requests in trouble up to which nothing is asked."""
    min_gain: float = tunable(0.005, 0.02)
    """Least lead, as a share of the requests, for which another candidate takes over.  One that
    surely gains less drops out of the replays."""
    effort: float = 2.0
    """Arrivals that may be replayed for each one that arrives; repetitions do not count."""
    seed: int = 0
    """Seed of the drawn output lengths."""
    candidates: Mapping[str, Policy] = field(default_factory=default_candidates)
    """Candidates by the specs that make them."""

    def __post_init__(self) -> None:
        check_positive(every_s=self.every_s, window_s=self.window_s)
        check_at_least(0, delay_s=self.delay_s, seed=self.seed)
        check_at_least(LEAST_JUDGED, max_requests=self.max_requests)
        check_share(trouble=self.trouble, min_gain=self.min_gain)
        if not self.effort > 0:
            raise ValueError(f"effort must be positive, or inf for no limit, not {self.effort}")
        if not self.candidates:
            raise ValueError("a portfolio needs at least one candidate, as in portfolio|goodput")
        if any(isinstance(candidate, Portfolio) for candidate in self.candidates.values()):
            raise ValueError("a candidate of a portfolio must not be a portfolio itself")
        self._forecaster: Forecaster | None = None
        self.reset()

    def forecast_with(self, forecaster: Forecaster | None) -> None:
        self._forecaster = forecaster
        self.reset()

    @property
    def forecaster(self) -> Forecaster | None:
        return self._forecaster

    def reset(self) -> None:
        for candidate in self.candidates.values():
            candidate.reset()
        self.current = next(iter(self.candidates))
        """The spec of the candidate that plans."""
        self.evaluations: deque[Evaluation] = deque(maxlen=_MOST_EVALUATIONS)
        """The latest evaluations, in order of time."""
        self.num_evaluations = 0
        self.num_changes = 0
        self.cpu_s = 0.0
        """Processor time of all evaluations."""
        self._planner = self.candidates[self.current]
        self._seen = Seen(self.window_s)
        self._is_urgent = True
        """Whether nothing was evaluated yet, or the latest evaluation saw a candidate ahead by
        `min_gain`, but not surely, or saw no trouble at all though there is some."""
        self._num_seen_before = 0
        """Number of requests that had arrived at the latest question that was not in vain."""
        self._scores = Scores()
        self._losers: tuple[str, ...] = ()
        self._asked: _Asked | None = None
        self._asked_s = -math.inf
        """Time of the latest question."""
        self._again_s = -math.inf
        """Time from which the next question is asked even if nothing is worse than expected."""
        self._interval_s = self.every_s
        """Time from an evaluation until then."""
        self._expected = 0.0
        """Share of requests in trouble that the latest evaluation expects."""
        self._begin_s = math.nan
        self._next_s = -math.inf if self._forecaster is not None else math.inf
        """Time of the next evaluation, or at which the answer to a question counts."""

    @property
    def prompt_order(self) -> PromptOrder:
        """Return the order of the candidate that plans now."""
        return self._planner.prompt_order

    def schedule(self, view: SchedulerView) -> SchedulerOutput:
        if self._forecaster is not None:
            self._seen.note(view.waiting)
            if view.now_s >= self._next_s:
                self._meet(view, self._forecaster)
        return self._planner.schedule(view)

    def choose_drafts(
        self, offers: Sequence[DraftOffer], output: SchedulerOutput, view: SchedulerView
    ) -> Sequence[int]:
        return self._planner.choose_drafts(offers, output, view)

    def schedule_beside(self, decodes: DecodeGroup, view: SchedulerView) -> SchedulerOutput | None:
        """Plan as the candidate does; return None when all requests have to be looked at."""
        if view.now_s >= self._next_s or not isinstance(self._planner, PlansBesideDecodes):
            return None
        output = self._planner.schedule_beside(decodes, view)
        if output is not None and self._forecaster is not None:
            self._seen.note(view.waiting)
        return output

    def decodes_until_s(self, decodes: DecodeGroup, limits: Limits) -> float:
        """Return the time of the candidate, but no later than the next evaluation or answer."""
        if not isinstance(self._planner, ForeseesDecodes):
            return -math.inf
        return min(self._next_s, self._planner.decodes_until_s(decodes, limits))

    def _meet(self, view: SchedulerView, forecaster: Forecaster) -> None:
        """Take the answer that is due, or look at the traffic and ask; set the next time."""
        now_s = view.now_s
        if math.isnan(self._begin_s):
            self._begin_s = now_s
        elif self._asked is not None:
            answer = forecaster.take_answer()
            if answer is None and forecaster.is_busy:
                self._next_s = now_s + _ASK_AGAIN_S
                return
            self._conclude(self._asked, answer, now_s)
            self._asked = None
        else:
            self._asked = self._ask(view, forecaster)
        if self._asked is not None:
            self._next_s = now_s + self.delay_s
        else:
            periods = math.floor((now_s - self._begin_s) / self.every_s) + 1
            self._next_s = self._begin_s + periods * self.every_s

    def _ask(self, view: SchedulerView, forecaster: Forecaster) -> _Asked | None:
        """Ask the simulator if something went wrong; return what was asked."""
        now_s, seen = view.now_s, self._seen
        shown = chain(view.waiting, view.running, view.swapped)
        seen.update(shown, now_s, view.limits.deadline_rule)
        model = view.model
        trouble = seen.trouble(now_s - self.window_s, now_s, model)
        if trouble.share <= self.trouble:
            return None
        is_surprise = seen.trouble(self._asked_s, now_s, model).exceeds(self._expected)
        if now_s < self._again_s and not is_surprise:
            return None
        left_out = tuple(n for n in self._losers if n != self.current)
        if self.num_evaluations % _ALL_AGAIN == 0 or len(left_out) == len(self.candidates) - 1:
            left_out = ()
        requests = seen.requests(now_s, self.max_requests, model)
        num_replayed = len(requests) * (len(self.candidates) - len(left_out))
        effort = self.effort * (_HASTE if is_surprise or self._is_urgent else 1.0)
        if num_replayed / effort > seen.num_seen - self._num_seen_before:
            return None
        kv = view.kv
        question = Question(
            requests=requests,
            output_lengths=seen.output_lengths,
            current=self.current,
            candidates=tuple(name for name in self.candidates if name not in left_out),
            eliminated=left_out,
            limits=view.limits,
            num_blocks=kv.num_blocks,
            block_size=kv.block_size,
            num_host_blocks=kv.num_free_host_blocks
            + sum(kv.num_held_host_blocks(request.request_id) for request in view.swapped),
            latency_model=frozen(model),
            horizon_s=self.window_s,
            max_requests=self.max_requests,
            min_gain=self.min_gain,
            seed=self.seed,
        )
        if not forecaster.ask(question):
            return None
        self._asked_s = now_s
        return _Asked(question, now_s, trouble, seen.num_seen)

    def _conclude(self, asked: _Asked, answer: Answer | None, now_s: float) -> None:
        """Learn from an answer, go over to a better candidate, and leave a record."""
        before, scores = self.current, self._scores
        self.num_evaluations += 1
        if answer is not None:
            self.cpu_s += answer.cpu_s
            if not (answer.good or answer.failed):
                self._leave(asked, answer, now_s, before, Reason.TOO_FEW)
                return
        if answer is None or before not in answer.good:
            self._leave(asked, answer, now_s, before, Reason.NO_ANSWER)
            return
        if answer.has_turned:
            scores.forget()
            self._losers = ()
        scores.add(answer.good)
        best = scores.best(before)
        gain = scores.lead(best, before)
        is_better = best != before and gain.low > 0 and gain.mean >= self.min_gain
        is_in_doubt = best != before and not is_better and gain.mean >= self.min_gain
        self._plan_next(asked, best, is_in_doubt)
        if is_better:
            self._go_over_to(best)
        if is_better or answer.has_turned:
            self._interval_s = self.every_s
        self._again_s = asked.at_s + self._interval_s
        self._expected = max(0.0, 1 - scores.share(self.current).mean - asked.unkeepable_share)
        reason = Reason.BETTER if is_better else Reason.UNSURE if best != before else Reason.BEST
        self._leave(asked, answer, now_s, before, reason)

    def _plan_next(self, asked: _Asked, best: str, is_in_doubt: bool) -> None:
        """Decide which candidates the next question leaves out, how urgent it is, and its time."""
        scores, replayed = self._scores, self._scores.latest
        kept = (name for name in self._losers if name not in replayed)
        self._losers = (*kept, *scores.losers(best, self.min_gain))
        if is_in_doubt:  # the next question is about these two
            self._losers = tuple(n for n in self.candidates if n not in (best, self.current))
        is_blank = all(scores.share(name).mean == 1 for name in (best, self.current))
        self._is_urgent = is_in_doubt or is_blank
        if not is_blank:
            self._num_seen_before = asked.num_seen
        if self._is_urgent:
            self._interval_s = 2 * self.every_s
        else:
            self._interval_s = min(2 * self._interval_s, _LONGEST_INTERVAL * self.every_s)

    def _go_over_to(self, candidate: str) -> None:
        self.current, self._planner = candidate, self.candidates[candidate]
        self._planner.reset()
        self.num_changes += 1

    def _leave(
        self, asked: _Asked, answer: Answer | None, now_s: float, before: str, reason: Reason
    ) -> None:
        """Keep the record of an evaluation."""
        question, good = asked.question, answer.good if answer is not None else {}
        requests, lengths = question.requests, question.output_lengths
        span_s = requests[-1].arrival_s
        concluded = reason in (Reason.BETTER, Reason.UNSURE, Reason.BEST)
        evaluation = Evaluation(
            asked_s=asked.at_s,
            counted_s=now_s,
            in_trouble=asked.trouble.share,
            num_requests=len(requests),
            num_judged=len(requests) - answer.num_unjudged if answer is not None else 0,
            requests_per_s=(len(requests) - 1) / span_s if span_s else 0.0,
            mean_prompt_tokens=sum(r.num_prompt_tokens for r in requests) / len(requests),
            mean_output_tokens=sum(lengths) / len(lengths) if lengths else 0.0,
            has_turned=answer is not None and answer.has_turned,
            scores={name: self._score(name, before) for name in good} if concluded else {},
            failed=dict(answer.failed) if answer is not None else {},
            eliminated=tuple(n for n in question.eliminated if n not in good),
            before=before,
            chosen=self.current,
            reason=reason,
            cpu_s=answer.cpu_s if answer is not None else 0.0,
        )
        self.evaluations.append(evaluation)

    def _score(self, candidate: str, before: str) -> Score:
        """Return the score of a candidate, in terms of all requests also if it dropped out."""
        share, lead = self._scores.share(candidate), self._scores.lead(candidate, before)
        shift = self._scores.share(before).mean + lead.mean - share.mean
        return Score(share.mean + shift, share.low + shift, share.high + shift, *lead)


@dataclass(frozen=True)
class _Asked:
    """A question that waits for its answer."""

    question: Question
    at_s: float
    trouble: Trouble
    num_seen: int
    """Number of requests that had arrived until then."""

    @property
    def unkeepable_share(self) -> float:
        """Return the share of requests that were bad because their promise cannot be kept."""
        return self.trouble.num_unkeepable / max(1, self.trouble.num_requests)


def portfolio_in(policy: Policy) -> Portfolio | None:
    """Return the portfolio that the policy is or wraps, if there is one."""
    found = asking_in(policy)
    return found if isinstance(found, Portfolio) else None
