"""The question to a simulator: how would each candidate have served the traffic of late?

The policy only states the question and reads the answer.  Who simulates is handed to it: the
simulator replays in line, a server in a process of its own (`slosched.simulator.race`).
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from slosched.core import SLO, LatencyModel, Limits, Policy
from slosched.policy.kit.wrapper import Wrapper


class PastRequest(NamedTuple):
    """A request that arrived in the window, or was being served when the window began."""

    arrival_s: float
    """Seconds after the begin of the window; negative if it arrived before."""
    num_prompt_tokens: int
    """Tokens of the prompt that were not found in the prefix cache."""
    max_tokens: int
    num_output_tokens: int
    """Tokens that it has emitted so far; its whole output if it has ended with a token."""
    has_ended: bool
    """Whether `num_output_tokens` is all that it emits; else its length has to be drawn."""
    slo: SLO
    priority: int
    lora_id: str | None
    in_trouble: bool = False
    """Whether it was rejected, late or overdue though its promise could have been kept."""
    num_emitted_before: int = 0
    """Tokens that it had emitted when the window began; with at least one it is a decode then."""
    first_token_s: float = math.nan
    """Time of the first of them, as `arrival_s`."""
    last_token_s: float = math.nan


@dataclass(frozen=True)
class Question:
    """Everything that replays of the window depend on."""

    requests: tuple[PastRequest, ...]
    """The requests in order of arrival; those that arrived before the window come first."""
    output_lengths: tuple[int, ...]
    """Output tokens of finished requests, from which unknown lengths are drawn."""
    current: str
    """Spec of the policy that plans."""
    candidates: tuple[str, ...]
    """Specs of the policies to replay; the one that plans is among them."""
    eliminated: tuple[str, ...]
    """Specs of the policies to replay only if the traffic has turned within the window."""
    limits: Limits
    num_blocks: int
    block_size: int
    num_host_blocks: int
    latency_model: LatencyModel
    """The model as it is now; replays do not change it."""
    horizon_s: float
    """Time for which the judged arrivals are replayed; they are repeated if they span less."""
    max_requests: int
    """Largest number of arrivals that are replayed, repeated ones included."""
    min_gain: float
    """A candidate that is surely not better than the best by so much drops out of the replays."""
    seed: int
    """Seed of the drawn output lengths."""


@dataclass(frozen=True)
class Answer:
    """The result of one question."""

    good: Mapping[str, tuple[float, ...]]
    """For each candidate, in which share of its repetitions each judged request was good.

    Of a candidate that dropped out there are only the first requests, up to the end of a block.
    Nothing is replayed, and there is no candidate, if too few requests could be judged.
    """
    num_unjudged: int
    """Requests before the first judged one, which only fill the replica."""
    has_turned: bool
    """Whether the traffic is another one since the first judged request."""
    failed: Mapping[str, str] = field(default_factory=dict)
    """What kept a candidate from having a result."""
    cpu_s: float = 0.0
    """Processor time of the replays; no decision depends on it."""


class Forecaster(Protocol):
    """A simulator that answers one question after the other."""

    def ask(self, question: Question) -> bool:
        """Begin to answer; return False, and forget the question, while it cannot be answered."""

    def take_answer(self) -> Answer | None:
        """Return the answer to the latest question once, or None while there is none."""

    @property
    def is_busy(self) -> bool:
        """Tell whether an answer is still to come."""


class AsksForecaster(Policy):
    """A policy that asks a simulator how its candidates would have served recent traffic."""

    @property
    @abstractmethod
    def forecaster(self) -> Forecaster | None:
        """Return who simulates, if anybody does."""

    @abstractmethod
    def forecast_with(self, forecaster: Forecaster | None) -> None:
        """Hand in who simulates; None ends the evaluations."""


def asking_in(policy: Policy) -> AsksForecaster | None:
    """Return the policy that asks a simulator: this one, or one that it wraps."""
    while isinstance(policy, Wrapper):
        policy = policy.inner
    return policy if isinstance(policy, AsksForecaster) else None
