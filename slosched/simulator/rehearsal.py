"""Answers to a portfolio's question: each candidate replays the same requests in virtual time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from slosched.core import Policy, Request
from slosched.engine.loop import Engine
from slosched.kv import KVCache
from slosched.metrics import RequestRecord
from slosched.metrics.columns import RequestColumns
from slosched.metrics.promises import good_requests
from slosched.policy.portfolio.question import Answer, PastRequest, Question, asking_in
from slosched.scheduler import Scheduler
from slosched.simulator.clients import Clients
from slosched.simulator.grouped import GroupedSteps
from slosched.simulator.open_loop import OpenLoop
from slosched.simulator.simulated import SimulatedExecutor, VirtualClock
from slosched.simulator.turns import first_alike


def answer(question: Question, after_each: Callable[[float], None] = lambda _cpu_s: None) -> Answer:
    """Replay the question's requests under each candidate, one after the other.

    `after_each` is called with the processor time that a candidate's replay took.
    """
    # Imports all policies, which only the replays of a portfolio need.
    from slosched.policy.spec import make_policy

    began_s = time.process_time()
    first, has_turned = first_alike(question.requests)
    lengths = draw_lengths(question)
    passes = _repeated(question, first)
    good: dict[str, tuple[float, ...]] = {}
    failed = {}
    for spec in (*question.candidates, *(question.eliminated if has_turned else ())):
        replay_s = time.process_time()
        try:
            verdicts = rehearse(question, passes, lengths, make_policy(spec))
            good[spec] = tuple(np.mean(verdicts, axis=0).tolist())
        except Exception as error:  # a candidate's own; the others are worth an answer
            failed[spec] = f"{type(error).__name__}: {error}"
        after_each(time.process_time() - replay_s)
    return Answer(good, first, has_turned, failed, time.process_time() - began_s)


@dataclass(frozen=True)
class Passes:
    """The judged requests of a question, which arrive several times."""

    first: int
    """Index of the first judged request."""
    num_passes: int
    period_s: float
    """Time from one pass to the next."""


def rehearse(
    question: Question, passes: Passes, lengths: Sequence[int], policy: Policy
) -> npt.NDArray[np.bool_]:
    """Return which of the judged requests are good if `policy` serves them, by pass and request.

    The replay begins with the decodes that ran when the window began.  The device takes as long as
    the question's latency model says, and request i emits `lengths[i]` tokens.
    """
    clock = VirtualClock()
    kv = KVCache(
        num_blocks=question.num_blocks,
        block_size=question.block_size,
        num_host_blocks=question.num_host_blocks,
    )
    model = question.latency_model
    scheduler = Scheduler(policy, kv, question.limits, model)
    window = [_made(f"r{i}", past, 0.0) for i, past in enumerate(question.requests)]
    again = [
        _made(f"r{i}.{k}", question.requests[i], k * passes.period_s)
        for k in range(1, passes.num_passes)
        for i in range(passes.first, len(window))
    ]
    emitted = dict(zip((r.request_id for r in window), lengths, strict=True))
    emitted |= {r.request_id: emitted[r.request_id.partition(".")[0]] for r in again}
    executor = SimulatedExecutor(model, clock, emitted)
    engine = Engine(scheduler, executor, clock)
    clients = Clients(scheduler)
    grouped = GroupedSteps(engine, executor, clock, clients)

    def run_some(arrival_s: float) -> None:
        if not grouped.run(arrival_s):
            engine.step()

    replay = OpenLoop(engine, clients, clock, run_some)
    for request in (*window, *again):
        if not scheduler.take_over(request):
            replay.add(request, request.arrival_s)
    replay.run()
    judged = [RequestRecord.from_request(r) for r in (*window[passes.first :], *again)]
    good = good_requests(RequestColumns.of(judged), question.limits.deadline_rule)
    return good.reshape(passes.num_passes, -1)


def _repeated(question: Question, first: int) -> Passes:
    """Return how often the judged requests arrive: once if they span half of the horizon."""
    requests, horizon_s = question.requests, question.horizon_s
    num_judged = len(requests) - first
    period_s = requests[-1].arrival_s - requests[first].arrival_s
    period_s *= num_judged / max(1, num_judged - 1)  # a gap before the next pass
    if not 0 < period_s < horizon_s / 2:
        return Passes(first, 1, period_s)
    most = max(1, (question.max_requests - first) // num_judged)
    return Passes(first, min(most, math.ceil(horizon_s / period_s)), period_s)


def draw_lengths(question: Question) -> list[int]:
    """Return how many tokens each request emits.

    A request that has ended emits what it emitted.  For any other a length is drawn from the
    finished requests that were longer than it is already; if there is none, it emits one token
    more than so far.
    """
    rng = np.random.default_rng(question.seed)
    known = np.sort(np.array(question.output_lengths, dtype=np.int64))
    drawn = []
    for past in question.requests:
        length, place = past.num_output_tokens, float(rng.random())
        if not past.has_ended:
            longer = known[np.searchsorted(known, length, side="right") :]
            length = int(longer[int(place * len(longer))]) if len(longer) else length + 1
        drawn.append(min(max(length, past.num_emitted_before + 1), past.max_tokens))
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


def rehearse_in_line(policy: Policy) -> None:
    """Let `policy`, or the one that it wraps, be answered in line if it asks a simulator."""
    asking = asking_in(policy)
    if asking is not None and asking.forecaster is None:
        asking.forecast_with(InLine())


def _made(request_id: str, past: PastRequest, later_s: float) -> Request:
    """Return a new request, with the tokens that it had emitted when the window began.

    A request that arrives again does so `later_s` later.
    """
    num_emitted = 0 if later_s else past.num_emitted_before
    times_s = np.linspace(past.first_token_s, past.last_token_s, num_emitted)
    return Request(
        request_id=request_id,
        arrival_s=past.arrival_s + later_s,
        num_prompt_tokens=past.num_prompt_tokens,
        max_tokens=past.max_tokens,
        slo=past.slo,
        priority=past.priority,
        lora_id=past.lora_id,
        num_output_tokens=num_emitted,
        output_token_ids=[0] * num_emitted,
        token_times_s=times_s.tolist(),
    )
