"""Several policies, of which the one plans that would have served the traffic of late best."""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

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
    foreseer,
    planner_beside,
    tunable,
)
from slosched.perfmodel.frozen import frozen
from slosched.policy.edf import EDF
from slosched.policy.fcfs import FCFS
from slosched.policy.goodput.policy import Goodput
from slosched.policy.kit.checks import check_at_least, check_positive, check_share
from slosched.policy.kit.deadlines import Deadlines
from slosched.policy.kit.drop import Drop
from slosched.policy.portfolio.evaluation import Evaluation, Reason, Score
from slosched.policy.portfolio.occasion import Occasions
from slosched.policy.portfolio.question import (
    Answer,
    AsksForecaster,
    Forecaster,
    Question,
    asking_in,
)
from slosched.policy.portfolio.scores import LEAST_JUDGED, Scores
from slosched.policy.portfolio.seen import Gathering, Seen, Trouble
from slosched.policy.published.qoserve import QoServe
from slosched.policy.published.slidebatching import SlideBatching
from slosched.policy.sjf import SJF
from slosched.policy.slo_aware import LateRule, SLOAware

_ASK_AGAIN_S = 0.1
"""Time between two looks for an answer that is overdue."""
_ALL_AGAIN = 4
"""One evaluation in so many replays all candidates, the eliminated ones included."""
_DESCRIBED = 64
"""Most requests that are described for a question in one step."""
_LEAST_SPAN = 1 / 8
"""Least part of `window_s` that the judged arrivals span before another candidate takes over.  They
may be a single burst, and what serves that best may be the worst for the next one."""
_LITTLE_TO_LOSE = 0.5
"""Share of good requests below which a burst is enough, since the candidate that plans fails it."""
_LEAST_IN_HASTE = 4 * LEAST_JUDGED
"""Least number of requests that are worth a question about fewer than the window has."""
_MOST_EVALUATIONS = 10_000
"""Evaluations whose records are kept."""


def default_candidates() -> dict[str, Policy]:
    """Return the candidates of a portfolio that names none, by their specs."""
    return {
        "goodput": Goodput(),
        "edf:token_budget=512,drop=infeasible": EDF(token_budget=512, drop=Drop.INFEASIBLE),
        "edf:token_budget=2048,drop=infeasible": EDF(token_budget=2048, drop=Drop.INFEASIBLE),
        "sjf:drop=infeasible": SJF(drop=Drop.INFEASIBLE),
        "fcfs:drop=infeasible": FCFS(drop=Drop.INFEASIBLE),
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
       estimated from the requests that have ended and from those that run (`simulator.lengths`).
       Arrivals that span less than half of `window_s` are repeated, since what they bring about may
       take that long to show.
    3. Candidates replay side by side.  One that surely gains less than `min_gain` against the best
       drops out, and the replays end when only the candidate that plans is left.
    4. `delay_s` later the answer counts.  The candidate that is ahead takes over if its lead is
       surely above zero (`scores`), as the best of so many, and at least `min_gain`.  If the
       arrivals that were judged are a single burst, more than half of them must be bad as well.
    5. A question has to be due and paid for (`occasion`): the time to the next one doubles while
       nothing is gained, and it may replay `effort` arrivals for each one since the question
       before, fewer if little is at stake.  More requests in trouble than the last answer foretold
       are followed up at once, by a shorter window if a whole one is not paid for.
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

    every_s: float = tunable(2.0, 5.0)
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
    effort: float = 1.5
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
        self._occasions = Occasions(self.every_s, self.effort)
        self._scores = Scores()
        self._losers: tuple[str, ...] = ()
        self._planned: _Planned | None = None
        """A question whose requests are being described."""
        self._asked: _Asked | None = None
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
        planner = planner_beside(self._planner)
        if planner is None or view.now_s >= self._next_s:
            return None
        output = planner.schedule_beside(decodes, view)
        if output is not None and self._forecaster is not None:
            self._seen.note(view.waiting)
        return output

    def decodes_until_s(self, decodes: DecodeGroup, limits: Limits) -> float:
        """Return the time of the candidate, but no later than the next evaluation or answer."""
        planner = foreseer(self._planner)
        if planner is None:
            return -math.inf
        return min(self._next_s, planner.decodes_until_s(decodes, limits))

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
            self._planned = self._planned or self._plan(view)
        if self._planned is not None:
            if not self._planned.gathering.describe(_DESCRIBED):
                self._next_s = now_s
                return
            self._asked = self._ask(self._planned, view, forecaster)
            self._planned = None
        if self._asked is not None:
            self._next_s = now_s + self.delay_s
        else:
            periods = math.floor((now_s - self._begin_s) / self.every_s) + 1
            self._next_s = self._begin_s + periods * self.every_s

    def _plan(self, view: SchedulerView) -> _Planned | None:
        """Return what to ask if something went wrong and replays are paid for."""
        now_s, seen, model, occasions = view.now_s, self._seen, view.model, self._occasions
        shown = chain(view.waiting, view.running, view.swapped)
        seen.update(shown, now_s, view.limits.deadline_rule)
        trouble = seen.trouble(now_s - self.window_s, now_s, model)
        if trouble.share <= self.trouble:
            return None
        is_surprise = occasions.is_surprise(seen.trouble(occasions.asked_s, now_s, model))
        left_out = tuple(n for n in self._losers if n != self.current)
        is_field_empty = len(left_out) == len(self.candidates) - 1
        if is_surprise or is_field_empty or self.num_evaluations % _ALL_AGAIN == 0:
            left_out = ()
        num_affordable = occasions.num_affordable(
            trouble, seen.num_seen, now_s, is_surprise=is_surprise
        )
        num_each = int(min(num_affordable / (len(self.candidates) - len(left_out)), sys.maxsize))
        gathering, horizon_s = seen.gather(now_s, self.max_requests, model), self.window_s
        if len(gathering) > num_each:
            if not is_surprise or num_each < _LEAST_IN_HASTE:
                return None
            gathering, horizon_s = seen.gather(now_s, num_each, model), 0.0
        return _Planned(gathering, left_out, horizon_s, now_s, trouble, seen.num_seen)

    def _ask(self, planned: _Planned, view: SchedulerView, forecaster: Forecaster) -> _Asked | None:
        """Ask the simulator; return what was asked, or None if it refuses."""
        kv = view.kv
        question = Question(
            requests=tuple(planned.gathering.requests),
            output_lengths=self._seen.output_lengths,
            current=self.current,
            candidates=tuple(n for n in self.candidates if n not in planned.left_out),
            eliminated=planned.left_out,
            limits=view.limits,
            num_blocks=kv.num_blocks,
            block_size=kv.block_size,
            num_host_blocks=kv.num_free_host_blocks
            + sum(kv.num_held_host_blocks(request.request_id) for request in view.swapped),
            latency_model=frozen(view.model),
            horizon_s=planned.horizon_s,
            max_requests=self.max_requests,
            min_gain=self.min_gain,
            seed=self.seed,
        )
        if not forecaster.ask(question):
            return None
        self._occasions.asked_s = planned.at_s
        return _Asked(question, planned.at_s, planned.trouble, planned.num_seen)

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
        gain = scores.lead(best, before, max(1, len(scores.latest) - 1))
        is_ahead = best != before and gain.mean >= self.min_gain
        has_little_to_lose = scores.share(before).mean < _LITTLE_TO_LOSE
        is_shown = has_little_to_lose or self._spans_enough(asked.question, answer)
        is_better = is_ahead and gain.low > 0 and is_shown
        is_in_doubt = is_ahead and not is_better
        self._leave_out_losers(best, is_in_doubt=is_in_doubt)
        if is_better:
            self._go_over_to(best)
        self._occasions.conclude(
            asked.at_s,
            asked.num_seen,
            is_blank=all(scores.share(name).mean == 1 for name in (best, before)),
            is_in_doubt=is_in_doubt,
            has_changed=is_better or answer.has_turned,
        )
        expected = 1 - scores.share(self.current).mean - asked.unkeepable_share
        self._occasions.expected = max(0.0, expected)
        reason = Reason.BETTER if is_better else Reason.UNSURE if best != before else Reason.BEST
        self._leave(asked, answer, now_s, before, reason)

    def _spans_enough(self, question: Question, answer: Answer) -> bool:
        """Tell whether what was judged came over long enough, or is as much as is looked at."""
        requests = question.requests
        span_s = requests[-1].arrival_s - requests[answer.num_unjudged].arrival_s
        return span_s >= _LEAST_SPAN * self.window_s or len(requests) >= self.max_requests

    def _leave_out_losers(self, best: str, *, is_in_doubt: bool) -> None:
        """Decide which candidates the next question leaves out; in doubt it is about two alone."""
        kept = (name for name in self._losers if name not in self._scores.latest)
        self._losers = (*kept, *self._scores.losers(best, self.min_gain))
        if is_in_doubt:
            self._losers = tuple(n for n in self.candidates if n not in (best, self.current))

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


class _Planned(NamedTuple):
    """A question that will be asked as soon as all of its requests are described."""

    gathering: Gathering
    left_out: tuple[str, ...]
    horizon_s: float
    at_s: float
    trouble: Trouble
    num_seen: int


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
