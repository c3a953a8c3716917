"""Answers to a portfolio's question: each candidate replays the same requests in virtual time."""

from __future__ import annotations

import time
from collections.abc import Mapping

import numpy as np

from slosched.core import Policy, Request
from slosched.engine.loop import Engine
from slosched.kv import KVCache
from slosched.metrics import RequestRecord
from slosched.metrics.columns import RequestColumns
from slosched.metrics.promises import good_requests
from slosched.policy.kit.wrapper import Wrapper
from slosched.policy.portfolio.policy import Portfolio
from slosched.policy.portfolio.question import Answer, PastRequest, Question
from slosched.policy.spec import make_policy
from slosched.scheduler import Scheduler
from slosched.simulator.clients import Clients
from slosched.simulator.grouped import GroupedSteps
from slosched.simulator.open_loop import play_open_loop
from slosched.simulator.simulated import SimulatedExecutor, VirtualClock
from slosched.simulator.turns import first_alike


def answer(question: Question) -> Answer:
    """Replay the question's requests under each candidate, from an empty replica."""
    began_s = time.process_time()
    first, has_turned = first_alike(question.requests)
    lengths = draw_lengths(question)
    good, failed = {}, {}
    for spec in (*question.candidates, *(question.eliminated if has_turned else ())):
        try:
            good[spec] = rehearse(question, lengths, make_policy(spec))[first:]
        except Exception as error:  # a candidate's own; the others are worth an answer
            failed[spec] = f"{type(error).__name__}: {error}"
    return Answer(good, first, has_turned, failed, time.process_time() - began_s)


def rehearse(question: Question, lengths: Mapping[str, int], policy: Policy) -> tuple[bool, ...]:
    """Return which of the question's requests are good if `policy` serves them.

    The replay begins with the decodes that ran when the window began.  The device takes as long as
    the question's latency model says, and `lengths` says how many tokens each request emits.
    """
    clock = VirtualClock()
    kv = KVCache(
        num_blocks=question.num_blocks,
        block_size=question.block_size,
        num_host_blocks=question.num_host_blocks,
    )
    model = question.latency_model
    scheduler = Scheduler(policy, kv, question.limits, model)
    executor = SimulatedExecutor(model, clock, lengths)
    engine = Engine(scheduler, executor, clock)
    clients = Clients(scheduler)
    grouped = GroupedSteps(engine, executor, clock, clients)

    def run_some(arrival_s: float) -> None:
        if not grouped.run(arrival_s):
            engine.step()

    requests = [_made(i, past) for i, past in enumerate(question.requests)]
    arriving = [request for request in requests if not scheduler.take_over(request)]
    enter_s = [request.arrival_s for request in arriving]
    play_open_loop(arriving, enter_s, engine, clients, clock, run_some)
    columns = RequestColumns.of([RequestRecord.from_request(request) for request in requests])
    return tuple(map(bool, good_requests(columns, question.limits.deadline_rule)))


def draw_lengths(question: Question) -> dict[str, int]:
    """Return how many tokens each request emits, by the name that it has in the replays.

    A request that has ended emits what it emitted.  For any other a length is drawn from the
    finished requests that were longer than it is already; if there is none, it emits one token
    more than so far.
    """
    rng = np.random.default_rng(question.seed)
    known = np.sort(np.array(question.output_lengths, dtype=np.int64))
    drawn = {}
    for i, past in enumerate(question.requests):
        length, place = past.num_output_tokens, float(rng.random())
        if not past.has_ended:
            longer = known[np.searchsorted(known, length, side="right") :]
            length = int(longer[int(place * len(longer))]) if len(longer) else length + 1
        drawn[_name(i)] = min(max(length, past.num_emitted_before + 1), past.max_tokens)
    return drawn


class InLine:
    """A forecaster that answers at once, in the thread that asks."""

    is_busy = False

    def __init__(self) -> None:
        self._answer: Answer | None = None

    def ask(self, question: Question) -> bool:
        self._answer = answer(question)
        return True

    def take_answer(self) -> Answer | None:
        taken, self._answer = self._answer, None
        return taken


def portfolio_in(policy: Policy) -> Portfolio | None:
    """Return the portfolio that the policy is or wraps, if there is one."""
    while isinstance(policy, Wrapper):
        policy = policy.inner
    return policy if isinstance(policy, Portfolio) else None


def rehearse_in_line(policy: Policy) -> None:
    """Let the portfolio in `policy`, if there is one, be answered in line."""
    portfolio = portfolio_in(policy)
    if portfolio is not None and portfolio.forecaster is None:
        portfolio.forecast_with(InLine())


def _made(index: int, past: PastRequest) -> Request:
    """Return a new request, with the tokens that it had emitted when the window began."""
    num_emitted = past.num_emitted_before
    times_s = np.linspace(past.first_token_s, past.last_token_s, num_emitted)
    return Request(
        num_output_tokens=num_emitted,
        output_token_ids=[0] * num_emitted,
        token_times_s=times_s.tolist(),
        request_id=_name(index),
        arrival_s=past.arrival_s,
        num_prompt_tokens=past.num_prompt_tokens,
        max_tokens=past.max_tokens,
        slo=past.slo,
        priority=past.priority,
        lora_id=past.lora_id,
    )


def _name(index: int) -> str:
    return f"r{index}"
