"""One candidate's replay of the requests of a portfolio's question, in virtual time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from slosched.core import DeadlineRule, Policy, Request
from slosched.engine.loop import Engine
from slosched.kv import KVCache
from slosched.metrics import RequestRecord
from slosched.metrics.columns import RequestColumns
from slosched.metrics.promises import good_requests
from slosched.perfmodel.frozen import FrozenModel
from slosched.policy.portfolio.question import PastRequest, Question
from slosched.scheduler import Scheduler
from slosched.simulator.clients import Clients
from slosched.simulator.disturbances import Disturbances
from slosched.simulator.grouped import GroupedSteps
from slosched.simulator.lengths import Lengths
from slosched.simulator.open_loop import OpenLoop
from slosched.simulator.simulated import SimulatedExecutor, VirtualClock

_PART_S = 1.0
"""Time on the replay's clock between two looks whether a request has ended."""


@dataclass(frozen=True)
class Passes:
    """The judged requests of a question, which arrive several times."""

    first: int
    """Index of the first judged request."""
    num_passes: int
    period_s: float
    """Time from one pass to the next."""


class Rehearsal:
    """A replay that goes on for as long as the verdicts on more requests are asked for.

    It begins with the decodes that ran when the window began.  The device takes as long as the
    question's latency model says, and request i emits `lengths[i]` tokens.  Where every gap between
    tokens counts, steps are as irregular as the model has found them to be.
    """

    def __init__(
        self, question: Question, passes: Passes, lengths: Sequence[int], policy: Policy
    ) -> None:
        self._clock = clock = VirtualClock()
        self._rule = question.limits.deadline_rule
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
        is_strict = question.limits.deadline_rule is DeadlineRule.TBT
        noise = model.noise if is_strict and isinstance(model, FrozenModel) else 0.0
        executor = SimulatedExecutor(
            model, clock, emitted, Disturbances(noise=noise), question.seed
        )
        engine = Engine(scheduler, executor, clock)
        clients = Clients(scheduler)
        grouped = GroupedSteps(engine, executor, clock, clients)

        def run_some(arrival_s: float) -> None:
            if not grouped.run(arrival_s):
                engine.step()

        self._judged = [*window[passes.first :], *again]
        self._num_in_pass = len(window) - passes.first
        self._verdicts: list[bool] = []
        self._replay = OpenLoop(engine, clients, clock, run_some)
        for request in (*window, *again):
            if not scheduler.take_over(request):
                self._replay.add(request, request.arrival_s)

    def judge(self, num_judged: int) -> list[float]:
        """Return the verdicts on the first judged requests, over all passes.

        Of several passes that is the share of passes in which each request was good.  They are
        whole passes, or a part of the first.
        """
        asked = self._judged[len(self._verdicts) : num_judged]
        for request in asked:
            while not request.status.is_ended:
                self._replay.run(self._clock.now_s() + _PART_S)
        columns = RequestColumns.of([RequestRecord.from_request(request) for request in asked])
        self._verdicts += good_requests(columns, self._rule).tolist()
        verdicts = np.array(self._verdicts).reshape(-1, min(num_judged, self._num_in_pass))
        return [float(share) for share in verdicts.mean(axis=0)]


def draw_lengths(question: Question) -> list[int]:
    """Return how many tokens each request emits; one that has ended emits what it emitted.

    The others' lengths are drawn on the condition that they are longer than they are already.
    """
    rng = np.random.default_rng(question.seed)
    unended = [past.num_output_tokens for past in question.requests if not past.has_ended]
    lengths = Lengths(question.output_lengths, unended)
    drawn = []
    for past in question.requests:
        length, place = past.num_output_tokens, float(rng.random())
        if not past.has_ended:
            length = lengths.longer_than(length, place)
        drawn.append(min(max(length, past.num_emitted_before + 1), past.max_tokens))
    return drawn


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
