"""Conversations, whose turns follow one another and repeat what was said before."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count, islice

import numpy as np

from slosched.workload.lengths import LengthDistribution, Lognormal
from slosched.workload.programs import with_think_times
from slosched.workload.request import TraceRequest

DEFAULT_QUESTION = Lognormal(mean_tokens=128, cv=1.5)
DEFAULT_ANSWER = Lognormal(mean_tokens=256, cv=1.0)
TOOL_RESULT = Lognormal(mean_tokens=3000, cv=1.5)
TOOL_CALL = Lognormal(mean_tokens=200, cv=1.0)
_MOST_BEFORE = 1_000_000
"""Most sessions that begin before time zero, which take minutes to draw."""


@dataclass(frozen=True, slots=True)
class Sessions:
    """The statistics of conversations.  The defaults are round numbers, fitted to no trace.

    A prompt is a system prompt, all questions and answers so far, and the next question. That
    question comes after the answer has been given (at `tpot_s` a token) and a think time has
    passed.
    """

    mean_turns: float = 4.0
    """Mean of a geometric distribution; at least one."""
    think_s: float = 30.0
    """Mean of an exponential time between the end of an answer and the next question."""
    tpot_s: float = 0.03
    question: LengthDistribution = DEFAULT_QUESTION
    answer: LengthDistribution = DEFAULT_ANSWER
    system_tokens: int = 512
    num_system_prompts: int = 8
    """Number of different system prompts; each session draws one of them evenly."""
    max_prompt_tokens: int = 32_768
    """Longest prompt; a conversation ends when its next prompt would be longer."""
    block_tokens: int = 16
    """Tokens of a prefix block; only full blocks of a prompt have a hash."""

    def __post_init__(self) -> None:
        for name, least in (("mean_turns", 1.0), ("think_s", 0.0), ("tpot_s", 0.0)):
            value = getattr(self, name)
            if not least <= value < math.inf:
                raise ValueError(f"{name} must be finite and at least {least:g}, not {value!r}")
        for name in ("num_system_prompts", "max_prompt_tokens", "block_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)!r}")
        if not 0 <= self.system_tokens < self.max_prompt_tokens:
            raise ValueError(
                f"system_tokens must be at least 0 and less than max_prompt_tokens "
                f"({self.max_prompt_tokens}), not {self.system_tokens!r}"
            )

    def requests(
        self, num_requests: int, rate: float, rng: np.random.Generator
    ) -> list[TraceRequest]:
        """Return the first requests from time zero on, in order of arrival, at about `rate` a
        second.

        Sessions begin as a Poisson process long before time zero. So the first request need not be
        the first turn of a session, and as many sessions are under way at the start as later.
        """
        found = islice(self._since_zero(rate, rng), num_requests)
        return [replace(request, request_id=str(i)) for i, request in enumerate(found)]

    def programs(
        self, num_requests: int, rate: float, rng: np.random.Generator
    ) -> list[TraceRequest]:
        """Return the turns of whole sessions, in a closed loop, in order of their session.

        Sessions begin from time zero on, as a Poisson process of `rate` / `mean_turns` a second.
        The last one is cut if it has more turns than are left of `num_requests`.  A turn's own
        arrival is when it would come if the answers took `tpot_s` a token.
        """
        found: list[TraceRequest] = []
        fresh = count(self.num_system_prompts * (self.system_tokens // self.block_tokens))
        start_s = 0.0
        for session in count():
            found += self._session(str(session), start_s, fresh, rng)
            if len(found) >= num_requests:
                break
            start_s += rng.exponential(self.mean_turns / rate)
        closed = with_think_times(found[:num_requests], self.tpot_s)
        return [replace(request, request_id=str(i)) for i, request in enumerate(closed)]

    def _since_zero(self, rate: float, rng: np.random.Generator) -> Iterator[TraceRequest]:
        turn_s = self.think_s + self.tpot_s * float(self.answer.draw(1000, rng).mean())
        start_s = -10 * self.mean_turns * turn_s
        num_before = -start_s * rate / self.mean_turns
        if num_before > _MOST_BEFORE:
            raise ValueError(
                f"at {rate:g} requests/s, {num_before:.2g} sessions would begin before the first "
                f"request, and at most {_MOST_BEFORE:,} are drawn: write a trace of a lower rate "
                "with `slosched trace make`, and scale that"
            )
        fresh = count(self.num_system_prompts * (self.system_tokens // self.block_tokens))
        to_come: list[tuple[float, int, TraceRequest]] = []
        num_drawn = 0
        for session in count():
            start_s += rng.exponential(self.mean_turns / rate)
            while to_come and to_come[0][0] <= start_s:
                arrival_s, _, request = heapq.heappop(to_come)
                if arrival_s >= 0:
                    yield request
            for request in self._session(str(session), start_s, fresh, rng):
                num_drawn += 1  # a tie-break, since requests cannot be compared
                heapq.heappush(to_come, (request.arrival_s, num_drawn, request))

    def _session(
        self, name: str, start_s: float, fresh: Iterator[int], rng: np.random.Generator
    ) -> Iterator[TraceRequest]:
        num_turns = int(rng.geometric(1 / self.mean_turns))
        questions = self.question.draw(num_turns, rng).tolist()
        answers = self.answer.draw(num_turns, rng).tolist()
        thoughts_s = rng.exponential(self.think_s, num_turns).tolist()
        num_shared = self.system_tokens // self.block_tokens
        first_shared = int(rng.integers(self.num_system_prompts)) * num_shared
        blocks = list(range(first_shared, first_shared + num_shared))
        num_tokens = self.system_tokens
        for question, answer, thought_s in zip(questions, answers, thoughts_s, strict=True):
            num_tokens += question
            if num_tokens > self.max_prompt_tokens:
                return
            blocks += islice(fresh, num_tokens // self.block_tokens - len(blocks))
            hashes = tuple(blocks)
            arrival_s = round(start_s, 6)  # machines differ in the last bit of a logarithm
            yield TraceRequest(
                name, arrival_s, num_tokens, answer, prefix_hashes=hashes, session_id=name
            )
            num_tokens += answer
            start_s += answer * self.tpot_s + thought_s


AGENTS = Sessions(
    mean_turns=62.0,
    think_s=5.0,
    question=TOOL_RESULT,
    answer=TOOL_CALL,
    system_tokens=8192,
    num_system_prompts=4,
    max_prompt_tokens=200_000,
    block_tokens=64,
)
"""Agents that call tools, with the medians of vLLM's issue 57103: 43 turns, 142 thousand tokens in
the last prompt of a session of that length, 96 % of all prompt tokens seen before.

A geometric distribution of mean 62 has the median 43, and 8,192 + 43 * 3,000 + 42 * 200 tokens are
146 thousand.  Sessions that would need more than 200,000 end there.  The mean time of 5 s between
turns is an assumption, as are the forms of the distributions.
"""
