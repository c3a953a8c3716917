"""vLLM's queues as a policy sees them: its requests as ours, brought up to date in every step."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from vllm.v1.request import RequestStatus as Status

from slosched.core import (
    LatencyModel,
    Limits,
    Request,
    RequestStatus,
    SchedulerView,
)
from slosched.integrations.vllm.kv_view import VLLMBlocks
from slosched.integrations.vllm.slo import BadPromiseError, Promises
from slosched.scheduler.queues import InOrder, Queues

_NUM_MATCHED_ANEW = 32
"""Waiting requests, from the front of the queue, whose prefix is looked up in every step; those
behind them keep what was found when they came."""


class Mirror:
    """Our requests beside vLLM's.

    A policy is shown only what vLLM could run now.  Not shown are requests that vLLM has nothing to
    compute for: the last token is on its way (`queues.finishing`), a grammar is being compiled,
    tokens of before a preemption are still to come.
    """

    def __init__(self, host: Any, kv: VLLMBlocks, promises: Promises, limits: Limits) -> None:
        """`host` is vLLM's scheduler."""
        self._host = host
        self._kv = kv
        self._promises = promises
        self._limits = limits
        self._requests: dict[str, Request] = {}
        self.queues = Queues()
        self.refused: dict[str, str] = {}
        """Requests whose promise cannot be read, and why; to be ended by the caller."""

    @property
    def limits(self) -> Limits:
        """Without the seats of those that are not shown; with one, where none is left."""
        limits, num_seats = self._limits, self.num_seats
        if num_seats == limits.max_num_seqs:
            return limits
        return replace(limits, max_num_seqs=max(1, num_seats))

    @property
    def num_seats(self) -> int:
        """Of those that are shown, and of those that could start; may be none."""
        num_hidden = len(self.queues.finishing) + self._host.num_waiting_for_streaming_input
        return int(self._limits.max_num_seqs - num_hidden)

    def view(self, begins_s: float, model: LatencyModel | None) -> SchedulerView:
        return SchedulerView(
            now_s=begins_s,
            waiting=InOrder(self.queues.waiting),
            running=tuple(self.queues.running.values()),
            swapped=(),
            kv=self._kv,
            limits=self.limits,
            latency_model=model,
        )

    def refresh(self, begins_s: float) -> None:
        """Read vLLM's queues.  O(requests).

        Tokens that are on their way count as emitted at `begins_s`, when the next step begins.
        """
        host, queues = self._host, self.queues
        running: dict[str, Request] = {}
        finishing: dict[str, Request] = {}
        for theirs in host.running:
            ours = self._find(theirs)
            if ours is None:
                continue
            self._read_progress(ours, theirs, begins_s)
            shown = finishing if self._has_nothing_to_compute(theirs) else running
            shown[theirs.request_id] = ours
        queues.running, queues.finishing = running, finishing
        queues.waiting = self._read_waiting(begins_s)

    def note_tokens(self, request_ids: Iterable[str], now_s: float) -> None:
        """Tokens of these requests may have come out; stamp them."""
        for request_id in request_ids:
            theirs = self._host.requests.get(request_id)
            ours = self._requests.get(request_id)
            if ours is not None and theirs is not None:
                num_known = ours.num_output_tokens - ours.num_output_placeholders
                num_new = theirs.num_output_tokens - num_known
                if num_new > 0:
                    times = ours.token_times_s
                    del times[num_known:]
                    times += [now_s] * num_new

    def forget(self, request_ids: Iterable[str]) -> None:
        """These have ended."""
        for request_id in request_ids:
            self._requests.pop(request_id, None)
            self.refused.pop(request_id, None)
            self._kv.forget(request_id)

    def _find(self, theirs: Any) -> Request | None:
        ours = self._requests.get(theirs.request_id)
        if ours is None and theirs.request_id not in self.refused:
            try:
                ours = self._requests[theirs.request_id] = self._made(theirs)
            except BadPromiseError as error:
                self.refused[theirs.request_id] = str(error)
        return ours

    def _made(self, theirs: Any) -> Request:
        ours = Request(
            theirs.request_id,
            theirs.arrival_time,
            theirs.num_prompt_tokens,
            max_tokens=max(
                1, min(theirs.max_tokens, self._host.max_model_len - theirs.num_prompt_tokens)
            ),
            slo=self._promises.of(theirs.sampling_params.extra_args),
            prompt_token_ids=theirs.prompt_token_ids,
            priority=theirs.priority,
            lora_id=None if theirs.lora_request is None else theirs.lora_request.lora_name,
        )
        ours.deadline_s = self._limits.deadline_rule.next_deadline_s(ours)
        return ours

    def _read_progress(self, ours: Request, theirs: Any, begins_s: float) -> None:
        ours.status = RequestStatus.RUNNING
        ours.num_computed_tokens = theirs.num_computed_tokens
        num_placeholders = theirs.num_output_placeholders
        num_known = theirs.num_output_tokens
        was_settled = not ours.num_output_placeholders and ours.num_output_tokens == num_known
        if was_settled and not num_placeholders:
            return
        times = ours.token_times_s
        del times[num_known:]
        times += [begins_s] * (num_known + num_placeholders - len(times))
        ours.num_output_placeholders = num_placeholders
        ours.num_output_tokens = num_known + num_placeholders
        ours.deadline_s = self._limits.deadline_rule.next_deadline_s(ours)

    def _has_nothing_to_compute(self, theirs: Any) -> bool:
        """vLLM's own rules for passing over a running request."""
        host, computed = self._host, theirs.num_computed_tokens
        placeholders = theirs.num_output_placeholders
        if placeholders and computed + 2 - placeholders >= (
            theirs.num_prompt_tokens + theirs.max_tokens
        ):
            return True
        return bool(
            theirs.num_tokens_with_spec + placeholders <= computed
            or computed + 1 >= host.max_model_len
            or host.current_step + 1 < theirs.next_decode_eligible_step
        )

    def _read_waiting(self, begins_s: float) -> OrderedDict[str, Request]:
        waiting: OrderedDict[str, Request] = OrderedDict()
        find, known = self._find, self._requests
        caches_prefixes = self._kv.caches_prefixes
        for theirs in self._host.waiting:
            request_id = theirs.request_id
            is_new = request_id not in known
            if theirs.status is not Status.WAITING and not self._is_ready(theirs):
                continue
            ours = find(theirs)
            if ours is None:
                continue
            if ours.status is not RequestStatus.WAITING or ours.num_output_placeholders:
                self._read_preempted(ours, theirs, begins_s)
            if caches_prefixes and (is_new or len(waiting) < _NUM_MATCHED_ANEW):
                ours.num_computed_tokens = self._kv.match(theirs)
            waiting[request_id] = ours
        return waiting

    def _is_ready(self, theirs: Any) -> bool:
        """vLLM's own rules for passing over a waiting request; this may find its grammar ready."""
        if not self._host._handle_blocked_waiting_request(theirs):
            return False
        return theirs.drop_stale_output or not theirs.num_stale_output_tokens

    def _read_preempted(self, ours: Request, theirs: Any, begins_s: float) -> None:
        self._read_progress(ours, theirs, begins_s)
        self._kv.forget(ours.request_id)
        ours.status = RequestStatus.WAITING
        ours.num_preemptions = theirs.num_preemptions
