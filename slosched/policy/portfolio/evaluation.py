"""The record of one evaluation: what a portfolio believed, what it chose, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any


class Reason(StrEnum):
    """Why a portfolio went over to another candidate, or did not."""

    BETTER = "better"
    """Another candidate is surely better: it plans from now on."""
    UNSURE = "unsure"
    """Another candidate is ahead, but not surely, or by too little."""
    BEST = "best"
    """No other candidate is ahead."""
    TOO_FEW = "too_few"
    """Too few requests could be judged."""
    NO_ANSWER = "no_answer"
    """The process that simulates was lost, or no candidate could be replayed."""


@dataclass(frozen=True)
class Score:
    """The share of good requests that a candidate would have reached, with its interval."""

    share: float
    low: float
    high: float
    lead: float
    """The share minus that of the candidate that planned until now, on the same arrivals."""
    lead_low: float
    lead_high: float


@dataclass(frozen=True)
class Evaluation:
    """One question to the simulator, and what came of it."""

    asked_s: float
    """Time on the engine's clock at which the window ended."""
    counted_s: float
    """Time at which the answer counted."""
    in_trouble: float
    """Share of the window's requests that were rejected, late or overdue though their promise could
    be kept."""
    num_requests: int
    num_judged: int
    requests_per_s: float
    mean_prompt_tokens: float
    mean_output_tokens: float
    """Mean output of the finished requests that are remembered; 0 before the first."""
    has_turned: bool
    """Whether the traffic turned within the window; then former scores are forgotten."""
    scores: Mapping[str, Score]
    """Scores of the candidates that were replayed, former evaluations included."""
    failed: Mapping[str, str]
    """What kept a candidate from being replayed."""
    eliminated: tuple[str, ...]
    """Candidates that were not replayed, since they had surely gained too little, or since the
    question was about two others."""
    before: str
    """The candidate that planned until now."""
    chosen: str
    reason: Reason
    cpu_s: float = field(compare=False)
    """Processor time of the replays."""

    def as_json(self) -> dict[str, Any]:
        """Return what a line of a file keeps."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Evaluation:
        """Return the evaluation that `as_json` gave; raise KeyError or TypeError for another."""
        scores = {name: Score(**score) for name, score in fields["scores"].items()}
        kept = {
            "scores": scores,
            "eliminated": tuple(fields["eliminated"]),
            "reason": Reason(fields["reason"]),
        }
        return cls(**{**fields, **kept})
