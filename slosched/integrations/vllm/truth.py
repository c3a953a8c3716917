"""A comparison of each plan with what vLLM executed, and counts of plans that failed."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

logger = logging.getLogger("vllm.slosched")


class Divergence(StrEnum):
    """The ways in which an executed step differs from its plan."""

    LESS = "less"
    """vLLM granted a request fewer tokens than planned, or none, and not because draft tokens
    filled the step."""
    MORE = "more"
    """vLLM granted a request more tokens than planned."""
    UNPLANNED = "unplanned"
    """vLLM ran a request that was not planned."""
    PREEMPTED = "preempted"
    """vLLM preempted a request that was to run."""


class Fallback(StrEnum):
    """The reasons for which a step followed vLLM's own order."""

    RAISED = "raised"
    """The policy raised, or its plan broke a limit."""
    STALLED = "stalled"
    """The policy scheduled nothing for a second while nothing ran, or only what vLLM had no room
    for."""


class Count(Protocol):
    """A function that is called with every event and its kind, or with several of a kind."""

    def __call__(self, event: str, kind: str, num: int = 1) -> None: ...


def _is_told(count: int) -> bool:
    """Tell whether to log the first, second, fourth, … event, so that the log is not flooded."""
    return count & (count - 1) == 0


def _nobody(event: str, kind: str, num: int = 1) -> None:
    """Ignore the event."""


@dataclass
class Truth:
    """Counts since the start; `count` is called for each event."""

    count: Count = _nobody
    max_num_tokens: int | None = None
    """The tokens of a full step; None if no step is ever full."""
    num_steps: int = 0
    """Steps that were planned."""
    num_diverged_steps: int = 0
    divergences: Counter[Divergence] = field(default_factory=Counter)
    """Steps in which each kind of divergence happened at least once."""
    num_deeper_matches: int = 0
    """Requests that had more cached than the plan saw, so that fewer tokens reached as far."""
    num_cut_by_drafts: int = 0
    """Steps whose last requests got fewer tokens, since draft tokens took their room."""
    fallbacks: Counter[Fallback] = field(default_factory=Counter)
    rejections: Counter[str] = field(default_factory=Counter)
    """Rejected requests, by reason."""
    num_silences: int = 0
    """Rejected requests of which the policy raised when asked when to come again."""

    def compare(
        self,
        planned: Mapping[str, int],
        output: Any,
        has_reached: Callable[[str, int], bool],
    ) -> bool:
        """Tell whether the executed step equals the plan to the token.

        `output` is vLLM's output for the plan; its draft tokens are not part of any plan.
        `has_reached` gets a request's id and its planned tokens, and tells whether the request got
        as far as planned.
        """
        self.num_steps += 1
        self.count("step", "planned")
        executed = output.num_scheduled_tokens
        if executed == planned:
            return True
        found: set[Divergence] = set()
        num_missing = 0
        drafts = output.scheduled_spec_decode_tokens
        for request_id, num_planned in planned.items():
            num_granted = executed.get(request_id, 0) - len(drafts.get(request_id, ()))
            if num_granted > num_planned:
                found.add(Divergence.MORE)
            elif num_granted < num_planned:
                if num_granted > 0 and has_reached(request_id, num_planned):
                    self.num_deeper_matches += 1
                else:
                    num_missing += num_planned - num_granted
        if num_missing and self._are_drafts_instead(num_missing, output):
            self.num_cut_by_drafts += 1
        elif num_missing:
            found.add(Divergence.LESS)
        if executed.keys() - planned.keys():
            found.add(Divergence.UNPLANNED)
        if planned.keys() & set(output.preempted_req_ids or ()):
            found.add(Divergence.PREEMPTED)
        if found:
            self._note(found, planned, executed)
        return False

    def _are_drafts_instead(self, num_missing: int, output: Any) -> bool:
        """Tell whether a step is full only because it has draft tokens, of which no plan knows."""
        num_drafts = sum(map(len, output.scheduled_spec_decode_tokens.values()))
        if self.max_num_tokens is None or num_missing > num_drafts:
            return False
        return bool(output.total_num_scheduled_tokens >= self.max_num_tokens)

    def note_fallback(self, why: Fallback, error: Exception | None = None) -> None:
        self.fallbacks[why] += 1
        self.count("fallback", why)
        count = self.fallbacks[why]
        if _is_told(count):
            logger.error(
                "slosched: the policy %s %d times; this step goes by vLLM's own order",
                why,
                count,
                exc_info=error,
            )

    def note_silence(self, error: Exception) -> None:
        """Count a policy that raised when it was asked when a rejected client should come again."""
        self.num_silences += 1
        if _is_told(self.num_silences):
            logger.error(
                "slosched: the policy raised %d times when asked what to tell a rejected client; "
                "the request is rejected without a time to come again",
                self.num_silences,
                exc_info=error,
            )

    def note_rejections(self, reason: str, num: int) -> None:
        self.rejections[reason] += num
        self.count("rejection", reason, num)

    def _note(
        self, found: set[Divergence], planned: Mapping[str, int], executed: Mapping[str, int]
    ) -> None:
        self.num_diverged_steps += 1
        self.divergences.update(found)
        self.count("step", "diverged")
        for kind in found:
            self.count("divergence", kind)
        if _is_told(self.num_diverged_steps):
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
