"""SGLang's queues: who waits, whose prompt was cut, who runs, and what the last step held.

SGLang learns that a request has ended when it looks at it again; until then it counts.  So these
lists keep the ended ones, and in overlapped steps those whose last token is on its way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from slosched.core import Request, RequestStatus, SchedulerView
from slosched.policy.engines.sglang.adder import num_known_outputs

_QUEUED = (RequestStatus.WAITING, RequestStatus.SWAPPED)


@dataclass(slots=True)
class LastBatch:
    """What was planned last."""

    requests: Sequence[Request] = ()
    is_prefill: bool = False
    chunked: Request | None = None
    """The one whose prompt it cut."""
    num_tokens: int = 0
    """Of prompts, and of decodes that were mixed in."""


@dataclass(slots=True)
class Queues:
    """In SGLang's order, and each request in one of them."""

    waiting: list[Request] = field(default_factory=list)
    """By the time at which they were queued last, or as they were sorted last."""
    running: list[Request] = field(default_factory=list)
    """Decodes."""
    chunked: Request | None = None
    """One at most has a part of its prompt computed."""
    tried: set[str] = field(default_factory=set)
    """Waiting requests that did not fit when it was their turn."""
    last: LastBatch = field(default_factory=LastBatch)
    present: set[str] = field(default_factory=set)
    """Running requests that can be planned."""
    num_founding_tokens: int = 0
    """Of the step that held prompts of `running` when nobody else ran."""
    newcomers: Sequence[Request] = ()
    """Of those that wait: who was not known before, in the order of arrival."""

    def follow(self, view: SchedulerView) -> bool:
        """Take over what happened since the last step; True if SGLang's loop has idled since.

        Whoever came here in another way than by this policy's plans finds a place, too.
        """
        has_idled = self._has_idled(view)
        if has_idled:
            self.running, self.last = [], LastBatch()
        self.present = {request.request_id for request in view.running}
        self.running = [r for r in self.running if self._is_decode(r)]
        last = self.last
        if self.chunked is not None and self.chunked.request_id not in self.present:
            self.chunked = None
        last.requests = [r for r in last.requests if r is last.chunked or self._is_decode(r)]
        self._adopt_waiting(view, self._adopt_running(view))
        return has_idled

    def turn_away(
        self, limit: int, view: SchedulerView, urgency: Callable[[Request], int]
    ) -> list[Request]:
        """Who finds, or makes, the queue longer than `limit` as the newcomers join it in turn.

        The least urgent goes, of equals the last; whoever has emitted tokens stays, and counts.
        """
        num_waiting = len(self.waiting) - len(self.newcomers)
        if num_waiting + len(self.newcomers) <= limit:
            return []
        known = {id(r) for r in self.waiting[:num_waiting]}
        by_time = [r for r in view.waiting if id(r) in known and not r.num_output_tokens]
        away = []
        for request in self.newcomers:
            if not request.num_output_tokens:
                by_time.append(request)
            if num_waiting < limit or not by_time:
                num_waiting += 1
                continue
            away.append(min(reversed(by_time), key=urgency))
            by_time.remove(away[-1])
        self.waiting = [r for r in self.waiting if r not in away]
        return away

    def merge_last(self) -> bool:
        """Those whose prompts are done run from now on; True if that may have made room.

        SGLang forgets that it was full if one of them has ended, and if nobody ran before.
        """
        last, self.last = self.last, LastBatch()
        if not last.is_prefill:
            return False
        excluded = (self.chunked, last.chunked)
        done = [r for r in last.requests if r not in excluded and not has_ended(r)]
        has_room = len(done) < len(last.requests) or (bool(done) and not self.running)
        if done and not self.running:
            self.num_founding_tokens = last.num_tokens
        self.running += done
        return has_room

    def is_pending(self, view: SchedulerView) -> bool:
        """True if a step is still running, so that more will be known soon."""
        return any(r.num_output_placeholders for r in view.running) or any(
            is_finishing(r) for r in (*self.running, *self.last.requests)
        )

    def _has_idled(self, view: SchedulerView) -> bool:
        """True if everybody had ended before the first of those that wait arrived."""
        known = (*self.running, *self.last.requests)
        if not known or view.running or not all(r.status.is_ended for r in known):
            return False
        end_s = max((r.end_s for r in known if r.end_s is not None), default=view.now_s)
        waiting = (*view.waiting, *view.swapped)
        return all(r.arrival_s > end_s and not r.num_preemptions for r in waiting)

    def _is_decode(self, request: Request) -> bool:
        """Also one that has ended, but not one that went back to a queue or was cut short."""
        if request.request_id in self.present:
            return request.is_decode
        return request.status.is_ended or is_finishing(request)

    def _adopt_running(self, view: SchedulerView) -> list[Request]:
        """Others' running requests; those that wait for their turn to be computed further."""
        known = {id(r) for r in (*self.running, *self.last.requests, self.chunked)}
        unknown = [r for r in view.running if id(r) not in known]
        self.running += [r for r in unknown if r.is_decode]
        begun = [r for r in unknown if not r.is_decode]
        if begun and self.chunked is None:
            self.chunked = begun.pop(0)
        return begun

    def _adopt_waiting(self, view: SchedulerView, begun: Sequence[Request]) -> None:
        """Newcomers stand at the end."""
        self.waiting, self.newcomers = [r for r in self.waiting if r.status in _QUEUED], ()
        if len(self.waiting) < len(view.waiting) + len(view.swapped):
            known = set(map(id, self.waiting))
            queued = (*view.swapped, *view.waiting)
            self.newcomers = [r for r in queued if id(r) not in known]
            self.waiting += self.newcomers
        if len(self.tried) > len(self.waiting):
            self.tried.intersection_update(r.request_id for r in self.waiting)
        if begun:
            self.waiting[:0] = begun


def is_finishing(request: Request) -> bool:
    """Its last token is on its way: there is nothing left to plan, but SGLang does not know."""
    return (
        request.num_output_placeholders > 0
        and request.num_output_tokens >= request.max_tokens
        and not request.status.is_ended
    )


def has_ended(request: Request) -> bool:
    """As far as SGLang knows: the tokens of a step that still runs are not out."""
    return request.status.is_ended or num_known_outputs(request) >= request.max_tokens
