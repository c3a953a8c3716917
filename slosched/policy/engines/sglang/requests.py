"""SGLang's queues: waiting requests, the cut prompt, running requests, and the last step's.

SGLang learns that a request has ended only when it looks at it again; until then the request
counts.  So these lists keep ended requests, and in overlapped steps those whose last token is on
its way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from slosched.core import Request, RequestStatus, SchedulerView
from slosched.policy.engines.sglang.adder import num_known_outputs

_QUEUED = (RequestStatus.WAITING, RequestStatus.SWAPPED)


@dataclass(slots=True)
class LastBatch:
    """The batch that was planned last."""

    requests: Sequence[Request] = ()
    is_prefill: bool = False
    chunked: Request | None = None
    """The request whose prompt this batch cut, if any."""
    num_tokens: int = 0
    """The tokens of its prompts and of the decodes that were mixed in."""


@dataclass(slots=True)
class Queues:
    """SGLang's queues, in its order; each request is in one of them."""

    waiting: list[Request] = field(default_factory=list)
    """Waiting requests, by the time at which they were last queued, or as they were last sorted."""
    running: list[Request] = field(default_factory=list)
    """Requests that decode."""
    chunked: Request | None = None
    """The only request that may have a part of its prompt computed."""
    num_chunked_tokens: int = 0
    """The known tokens of `chunked` when its prompt was cut."""
    tried: set[str] = field(default_factory=set)
    """Waiting requests that did not fit when it was their turn."""
    last: LastBatch = field(default_factory=LastBatch)
    present: set[str] = field(default_factory=set)
    """Running requests that can be planned."""
    num_founding_tokens: int = 0
    """The tokens of the step that computed the prompts of `running` when no other request ran."""
    newcomers: Sequence[Request] = ()
    """Waiting requests that are new since the last step, in the order of arrival."""
    ends: tuple[Request, ...] = ()
    """The first and the last of those that waited when newcomers were last looked for."""

    def follow(self, view: SchedulerView) -> bool:
        """Update the queues since the last step; tell whether SGLang's loop has idled since then.

        Requests that this policy did not plan itself, such as another policy's running ones, get a
        place as well.
        """
        has_idled = self._has_idled(view)
        if has_idled:
            self.running, self.last = [], LastBatch()
        self.present = {request.request_id for request in view.running}
        self.running = [r for r in self.running if self._is_decode(r)]
        last = self.last
        if self.chunked is not None and self.chunked.request_id not in self.present:
            self.chunked = None
        elif self.chunked is not None and self.chunked.num_tokens > self.num_chunked_tokens:
            self.chunked = last.chunked = None  # another policy has computed the rest of its prompt
        last.requests = [r for r in last.requests if r is last.chunked or self._is_decode(r)]
        self._adopt_waiting(view, self._adopt_running(view))
        return has_idled

    def turn_away(
        self, limit: int, view: SchedulerView, urgency: Callable[[Request], int]
    ) -> list[Request]:
        """Return requests to drop when the queue exceeds `limit` as the newcomers join one by one.

        The least urgent goes, and among equals the last.  Requests that have emitted tokens stay,
        but count.
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

    def cut(self, request: Request) -> None:
        """Note the request as the one of which a part of the prompt is computed."""
        self.chunked, self.num_chunked_tokens = request, request.num_tokens

    def merge_last(self) -> bool:
        """Move requests of the last batch whose prompts are done to `running`.

        Tells whether that may have made room: SGLang forgets that it was full if one of them has
        ended, or if no request ran before.
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
        """Tell whether a step is still running, so that more will be known soon."""
        return any(r.num_output_placeholders for r in view.running) or any(
            is_finishing(r) for r in (*self.running, *self.last.requests)
        )

    def _has_idled(self, view: SchedulerView) -> bool:
        """Tell whether all requests had ended before the first waiting one arrived."""
        known = (*self.running, *self.last.requests)
        if not known or view.running or not all(r.status.is_ended for r in known):
            return False
        end_s = max((r.end_s for r in known if r.end_s is not None), default=view.now_s)
        waiting = (*view.waiting, *view.swapped)
        return all(r.arrival_s > end_s and not r.num_preemptions for r in waiting)

    def _is_decode(self, request: Request) -> bool:
        """Tell whether the request decodes or has ended.

        False if it went back to a queue or its prompt was cut.
        """
        if request.request_id in self.present:
            return request.is_decode
        return request.status.is_ended or is_finishing(request)

    def _adopt_running(self, view: SchedulerView) -> list[Request]:
        """Add unknown running requests to the queues; return those whose prompts have to wait."""
        known = {id(r) for r in (*self.running, *self.last.requests, self.chunked)}
        unknown = [r for r in view.running if id(r) not in known]
        self.running += [r for r in unknown if r.is_decode]
        begun = [r for r in unknown if not r.is_decode]
        if begun and self.chunked is None:
            self.cut(begun.pop(0))
        return begun

    def adopt_newcomers(self, view: SchedulerView) -> None:
        """Add newcomers at the end of the waiting queue; none if its ends are what they were.

        Who joins is the first or the last of those that wait.
        """
        if view.waiting and (view.waiting[0], view.waiting[-1]) != self.ends:
            self._adopt_waiting(view, ())

    def _adopt_waiting(self, view: SchedulerView, begun: Sequence[Request]) -> None:
        """Add newcomers at the end of the waiting queue, and the begun prompts at its front."""
        self.ends = (view.waiting[0], view.waiting[-1]) if view.waiting else ()
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
    """Tell whether its last token is on its way, so that only SGLang still counts it."""
    return (
        request.num_output_placeholders > 0
        and request.num_output_tokens >= request.max_tokens
        and not request.status.is_ended
    )


def has_ended(request: Request) -> bool:
    """Tell whether the request has ended as far as SGLang knows.

    SGLang does not yet know the tokens of a step that still runs.
    """
    return request.status.is_ended or num_known_outputs(request) >= request.max_tokens
