"""What a KV connector would load for the requests that a plan starts.

A policy cannot ask for a load.  It plans to start a request, and the connector is asked then, as
vLLM asks it when it comes upon the request.  If the answer changes what the request needs, the
policy plans again with that known.

Source: vLLM 0.32 `v1/core/sched/scheduler.py`, and the contract in
`distributed/kv_transfer/kv_connector/v1/base.py`: `get_num_new_matched_tokens` may be called
several times for a request.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from vllm.v1.request import RequestStatus as Status

from slosched.core import Request, SchedulerOutput
from slosched.integrations.vllm.forecast import Load
from slosched.integrations.vllm.kv_view import VLLMBlocks
from slosched.scheduler.queues import Queues


class Loads:
    """The answers of a connector within one step.

    A load that is done before the step's forward pass (synchronous) counts as cached tokens. For
    one that takes longer (asynchronous), the request gets blocks but no tokens in this step: vLLM
    begins the load in its place in the plan, and the policy sees the request again when it is done.
    """

    def __init__(self, host: Any, kv: VLLMBlocks, queues: Queues) -> None:
        """Ask the connector of `host`, vLLM's scheduler, about requests in `queues`."""
        self._host = host
        self._kv = kv
        self._queues = queues
        self._asked: dict[str, int] = {}
        """The cached tokens with which the connector was asked about each request."""
        self._shown_before: dict[str, tuple[Request, int]] = {}
        """Requests that are shown with tokens of a load, and their computed tokens without it."""
        self._begun: dict[str, frozenset[str]] = {}
        """Requests whose load begins in this step, with all requests that were planned before."""

    def begin_step(self) -> None:
        """Forget the answers of the step before."""
        self._asked.clear()
        self._begun.clear()
        self._kv.num_loaded_tokens.clear()
        self._kv.loads.clear()
        for request_id, (ours, num_tokens) in self._shown_before.items():
            if request_id in self._queues.waiting:
                ours.num_computed_tokens = num_tokens
        self._shown_before.clear()

    def settle(self, plan: SchedulerOutput) -> bool:
        """Ask about the requests that the plan starts; tell whether it has to be made anew.

        With a prefix cache, an answer may change what those behind find, so they are asked about
        when the plan has been made anew.
        """
        changes = False
        before: list[str] = []
        for request_id in plan.num_scheduled_tokens:
            if (ours := self._queues.waiting.get(request_id)) is not None:
                num_local = plan.num_found_tokens.get(request_id, ours.num_computed_tokens)
                # It finds less than before if those are gone that would have filled its blocks.
                if request_id not in self._asked or num_local < self._asked[request_id]:
                    self._asked[request_id] = num_local
                    changes |= self._ask(ours, num_local, before)
            before.append(request_id)
            if changes and self._kv.caches_prefixes:
                return True
        return changes or self._passes_over_next(plan)

    def order(self, planned: Mapping[str, int]) -> list[str]:
        """Return the plan's requests with the loads that begin, each where it was planned."""
        order: list[str] = []
        left = dict(self._begun)
        for request_id in planned:
            for load, before in list(left.items()):
                if request_id not in before and request_id in self._queues.waiting:
                    order.append(load)
                    del left[load]
            order.append(request_id)
        return [*order, *left]

    def without_held_back(
        self, planned: Mapping[str, int], order: Iterable[str], executed: Mapping[str, int]
    ) -> Mapping[str, int]:
        """Return the plan without those that wait behind a load for which there were no blocks.

        vLLM begins a load only if the blocks that all begun prompts still need stay free.  If it
        cannot begin, nothing behind it starts in that step, so that its turn comes.
        """
        requests = self._host.requests
        order = list(order)
        for place, request_id in enumerate(order):
            is_waiting = requests[request_id].status is not Status.WAITING_FOR_REMOTE_KVS
            if request_id in self._begun and is_waiting:
                behind = {name for name in order[place:] if name not in executed}
                return {name: n for name, n in planned.items() if name not in behind}
        return planned

    def free_failed(self, output: Any) -> None:
        """Free the blocks of loads that failed as a whole, as vLLM does when it looks at a queue.

        vLLM looks at it in each step that has tokens and seats left and preempts nobody.
        """
        host = self._host
        if (
            not host.failed_recving_kv_req_ids
            or output.preempted_req_ids
            or output.total_num_scheduled_tokens >= host.max_num_scheduled_tokens
            or len(host.running) >= host.max_num_active_reqs
        ):
            return
        for theirs in host.kv_holding_waiting:
            failed = theirs.request_id in host.failed_recving_kv_req_ids
            if failed and not theirs.num_computed_tokens:
                host._handle_blocked_waiting_request(theirs)

    def _ask(self, ours: Request, num_local: int, before: list[str]) -> bool:
        request_id = ours.request_id
        theirs = self._host.requests[request_id]
        if theirs.num_computed_tokens:
            return self._take_loaded(theirs)
        if theirs.skip_reading_prefix_cache:
            return False
        num_local -= num_local % self._kv.block_size
        num_more, is_async = self._host.connector.get_num_new_matched_tokens(theirs, num_local)
        if num_more == 0:
            return False
        if num_more is None:
            del self._queues.waiting[request_id]  # the connector does not know yet
        elif is_async:
            self._begin(request_id, num_local + num_more, before)
        else:
            self._shown_before[request_id] = ours, ours.num_computed_tokens
            ours.num_computed_tokens = num_local + num_more
            self._kv.num_loaded_tokens[request_id] = num_local + num_more
        return True

    def _passes_over_next(self, plan: SchedulerOutput) -> bool:
        """Take the next waiting request out of the view if the connector knows nothing yet.

        A policy may let all others wait behind it until it fits; vLLM passes over it.
        """
        if plan.preempted or len(plan.num_scheduled_tokens) >= self._host.max_num_active_reqs:
            return False
        planned = plan.num_scheduled_tokens
        ours = next((r for r in self._queues.waiting.values() if r.request_id not in planned), None)
        if ours is None or ours.request_id in self._asked:
            return False
        theirs = self._host.requests[ours.request_id]
        if theirs.num_computed_tokens or theirs.skip_reading_prefix_cache:
            return False
        num_local = ours.num_computed_tokens - ours.num_computed_tokens % self._kv.block_size
        num_more, _ = self._host.connector.get_num_new_matched_tokens(theirs, num_local)
        if num_more is None:
            del self._queues.waiting[ours.request_id]
        return num_more is None

    def _take_loaded(self, theirs: Any) -> bool:
        """Let vLLM put loaded blocks into its prefix cache, where others of this step find them."""
        if theirs.status is not Status.WAITING_FOR_REMOTE_KVS:
            return False
        self._host._handle_blocked_waiting_request(theirs)
        return self._kv.caches_prefixes

    def _begin(self, request_id: str, num_tokens: int, before: list[str]) -> None:
        """Take the request out of the view; reserve its blocks and a place, if they are free."""
        num_ready = self._kv.ledger().num_ready_blocks(request_id)
        num_blocks = -(-num_tokens // self._kv.block_size) - num_ready
        del self._queues.waiting[request_id]
        if num_blocks <= self._kv.num_free_blocks:
            self._begun[request_id] = frozenset(before)
            self._kv.loads.append(Load(self._begun[request_id], num_blocks))
