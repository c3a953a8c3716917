"""What was planned against what vLLM executed, in every step, and how often a plan failed."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

logger = logging.getLogger("vllm.slosched")


class Divergence(StrEnum):
    """How an executed step differs from its plan."""

    LESS = "less"
    """vLLM granted a request fewer tokens than planned, or none."""
    MORE = "more"
    """vLLM granted a request more tokens than planned."""
    UNPLANNED = "unplanned"
    """vLLM ran a request that was not planned."""
    PREEMPTED = "preempted"
    """vLLM preempted a request that was to run."""


class Fallback(StrEnum):
    """Why a step went by vLLM's own order."""

    RAISED = "raised"
    """The policy raised, or its plan broke a limit."""
    STALLED = "stalled"
    """The policy scheduled nothing for a second while nothing ran."""


Count = Callable[[str, str], None]
"""Told of every event and its kind."""


def _nobody(event: str, kind: str) -> None:
    """Nobody wants to know."""


@dataclass
class Truth:
    """Counts since the start; `count` is told of each."""

    count: Count = _nobody
    num_steps: int = 0
    """Steps that were planned."""
    num_diverged_steps: int = 0
    divergences: Counter[Divergence] = field(default_factory=Counter)
    """Steps in which this happened at least once."""
    num_deeper_matches: int = 0
    """Requests of which more was cached than seen when planning: fewer tokens reached as far."""
    fallbacks: Counter[Fallback] = field(default_factory=Counter)
    rejections: Counter[str] = field(default_factory=Counter)
    """By reason."""

    def compare(
        self,
        planned: Mapping[str, int],
        output: Any,
        has_reached: Callable[[str, int], bool],
    ) -> bool:
        """Whether the step is the plan to the token.

        `output` is what vLLM's scheduler made of the plan; its draft tokens are nobody's plan.
        `has_reached` tells of a request and its planned tokens whether it got as far.
        """
        self.num_steps += 1
        self.count("step", "planned")
        executed = output.num_scheduled_tokens
        if executed == planned:
            return True
        found: set[Divergence] = set()
        drafts = output.scheduled_spec_decode_tokens
        for request_id, num_planned in planned.items():
            num_granted = executed.get(request_id, 0) - len(drafts.get(request_id, ()))
            if num_granted > num_planned:
                found.add(Divergence.MORE)
            elif num_granted < num_planned:
                if num_granted > 0 and has_reached(request_id, num_planned):
                    self.num_deeper_matches += 1
                else:
                    found.add(Divergence.LESS)
        if executed.keys() - planned.keys():
            found.add(Divergence.UNPLANNED)
        if planned.keys() & set(output.preempted_req_ids or ()):
            found.add(Divergence.PREEMPTED)
        if found:
            self._note(found, planned, executed)
        return False

    def note_fallback(self, why: Fallback, error: Exception | None = None) -> None:
        self.fallbacks[why] += 1
        self.count("fallback", why)
        count = self.fallbacks[why]
        if count & (count - 1) == 0:  # the first, second, fourth, … so that no log drowns
            logger.error(
                "slosched: the policy %s %d times; this step goes by vLLM's own order",
                why,
                count,
                exc_info=error,
            )

    def note_rejection(self, reason: str) -> None:
        self.rejections[reason] += 1
        self.count("rejection", reason)

    def _note(
        self, found: set[Divergence], planned: Mapping[str, int], executed: Mapping[str, int]
    ) -> None:
        self.num_diverged_steps += 1
        self.divergences.update(found)
        self.count("step", "diverged")
        for kind in found:
            self.count("divergence", kind)
        if self.num_diverged_steps & (self.num_diverged_steps - 1) == 0:
            changed = {
                name: (planned.get(name, 0), executed.get(name, 0))
                for name in planned.keys() | executed.keys()
                if planned.get(name, 0) != executed.get(name, 0)
            }
            logger.warning(
                "slosched: %d of %d steps were not executed as planned (%s); the last: "
                "{request: (planned, executed)} = %s",
                self.num_diverged_steps,
                self.num_steps,
                ", ".join(f"{kind}: {count}" for kind, count in self.divergences.items()),
                dict(list(changed.items())[:8]),
            )
