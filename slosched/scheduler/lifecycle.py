"""What becomes of a request in the Scheduler: its queue, its status and the KV blocks it holds."""

from __future__ import annotations

from collections.abc import Iterable

from slosched.core import SLO, BlockCopy, EndReason, Limits, Request, RequestStatus
from slosched.kv import KVCache
from slosched.scheduler.groups import Groups
from slosched.scheduler.queues import Queues
from slosched.scheduler.speculation import Speculation


class Lifecycle:
    """Every change of a request's status, together with its queue and its KV blocks.

    The plan or the event that asks for a change has been checked before.
    """

    def __init__(
        self,
        queues: Queues,
        kv: KVCache,
        limits: Limits,
        groups: Groups,
        speculation: Speculation | None,
    ) -> None:
        self._queues = queues
        self._kv = kv
        self._limits = limits
        self._groups = groups
        self._speculation = speculation
        self._ended: list[Request] = []

    def release(self, requests: list[Request]) -> None:
        """Queue requests that were held back, in front of those that have not been admitted."""
        for request in reversed(requests):
            del self._queues.held[request.request_id]
            self._queues.put_first(request)
            self._kv.prefixes.watch(request)

    def start(self, request_id: str, started_s: float | None) -> Request:
        """Let a waiting request run, and return it."""
        request = self._queues.running[request_id] = self._queues.waiting.pop(request_id)
        request.status = RequestStatus.RUNNING
        if request.started_s is None:
            request.started_s = started_s
        if not request.num_preemptions:
            request.num_cached_tokens = request.num_computed_tokens
        if request.group is not None:
            self._groups.note_started(request)
        return request

    def preempt(self, request_ids: Iterable[str]) -> None:
        """Return requests to the front of the queue, the last-named as the very first."""
        for request_id in request_ids:
            request = self._queues.running.pop(request_id)
            self._kv.free(request_id)
            request.status = RequestStatus.WAITING
            request.num_computed_tokens = 0
            request.num_preemptions += 1
            self._queues.put_first(request)
            self._kv.prefixes.watch(request)

    def ease(self, request: Request, slo: SLO) -> None:
        """Keep a request without a token that the plan rejects, with another SLO.

        It gives back its KV blocks, since the plan counts on them.  Siblings that have begun to
        emit keep their SLO.
        """
        members = (request,) if request.group is None else request.group.members
        for member in members:
            if not member.num_output_tokens and not member.status.is_ended:
                member.asked_slo = member.asked_slo or member.slo
                member.slo = slo
                member.deadline_s = self._limits.deadline_rule.next_deadline_s(member)
        if request.status is RequestStatus.SWAPPED:
            self._queues.running[request.request_id] = self._queues.swapped.pop(request.request_id)
        if request.status is not RequestStatus.WAITING:
            self.preempt((request.request_id,))

    def swap_out(self, request_ids: Iterable[str]) -> list[BlockCopy]:
        """Move the blocks of running requests to the host; return the copies that this takes."""
        copies: list[BlockCopy] = []
        for request_id in request_ids:
            copies += self._kv.swap_out(request_id)
            request = self._queues.swapped[request_id] = self._queues.running.pop(request_id)
            request.status = RequestStatus.SWAPPED
            request.num_preemptions += 1
            request.num_swaps += 1
        return copies

    def swap_in(self, request_ids: Iterable[str]) -> list[BlockCopy]:
        """Move the blocks of swapped requests back; return the copies that this takes."""
        copies: list[BlockCopy] = []
        for request_id in request_ids:
            copies += self._kv.swap_in(request_id)
            request = self._queues.running[request_id] = self._queues.swapped.pop(request_id)
            request.status = RequestStatus.RUNNING
        return copies

    def end(self, request: Request, reason: EndReason, now_s: float) -> None:
        """End an unfinished request, which gives back all that it holds."""
        assert not request.status.is_ended, f"{request.request_id!r} would end twice"
        self._queues.remove(request)
        # The prefix cache asks how and when the request ended.
        request.status, request.end_reason, request.end_s = reason.status, reason, now_s
        self._kv.forget(request.request_id)
        if self._speculation is not None:
            self._speculation.forget(request.request_id)
        if request.num_output_placeholders:
            request.num_output_placeholders = 0
            request.num_output_tokens -= 1
            request.output_token_ids.pop()
            request.token_times_s.pop()
        self._ended.append(request)
        if request.group is not None:
            self._groups.note_ended(request)

    def take_ended(self) -> list[Request]:
        """Return the requests that ended since the last call, each exactly once."""
        ended, self._ended = self._ended, []
        return ended
