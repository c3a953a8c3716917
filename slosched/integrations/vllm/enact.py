"""A plan carried out by vLLM's own `schedule`, which is shown only the planned requests."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from vllm.v1.core.sched.request_queue import FCFSRequestQueue
from vllm.v1.request import RequestStatus as Status

_RUNNING = Status.RUNNING
_FEW = 8
"""Number of requests up to which each is taken out of vLLM's queue by itself."""


class Caps:
    """The tokens that each planned request may compute in this step; no limits without a plan."""

    def __init__(self) -> None:
        self._num_planned: Mapping[str, int] | None = None

    def __call__(self, request: Any, num_computed_tokens: int, num_new_tokens: int) -> int:
        """Return `num_new_tokens` as vLLM chose it, or fewer if the plan says so.

        A request that is planned to compute all its known tokens is not limited, since vLLM adds
        draft tokens to those.
        """
        if self._num_planned is None:
            return num_new_tokens
        num_planned = self._num_planned.get(request.request_id)
        num_known = request.num_tokens + request.num_output_placeholders
        if num_planned is None or num_computed_tokens + num_planned >= num_known:
            return num_new_tokens
        return min(num_new_tokens, num_planned)

    @contextmanager
    def of(self, num_planned: Mapping[str, int]) -> Iterator[None]:
        self._num_planned = num_planned
        try:
            yield
        finally:
            self._num_planned = None


def preempt(host: Any, request_ids: Iterable[str]) -> None:
    """Preempt running requests as vLLM does: they lose seat and blocks and lead its queue."""
    for request_id in request_ids:
        request = host.requests[request_id]
        host.running.remove(request)
        host._preempt_request(request, time.monotonic(), host.requires_kv_delivery)


def preempt_surplus_adapters(host: Any) -> None:
    """Preempt those that run with more LoRA adapters than one step may use, the latest first.

    A policy may let them take turns, which vLLM never does: it runs all at once, and asserts that
    their adapters fit.
    """
    if host.lora_config is None:
        return
    adapters: set[int] = set()
    surplus: list[str] = []
    for request in host.running:
        if request.lora_request is None:
            continue
        adapter = request.lora_request.lora_int_id
        if adapter in adapters or len(adapters) < host.lora_config.max_loras:
            adapters.add(adapter)
        else:
            surplus.append(request.request_id)
    preempt(host, reversed(surplus))


def end(host: Any, request_ids: Collection[str]) -> list[Any]:
    """End requests as if their clients had left; return those that had not ended yet.

    vLLM goes through its whole queue for that.  Most that a policy rejects have just come, so it is
    shown no queue if all of them were the last ones there.
    """
    waiting, latest = host.waiting, list[Any]()
    if isinstance(waiting, FCFSRequestQueue):
        while waiting and waiting[-1].request_id in request_ids:
            latest.append(waiting.pop())
    if len(latest) < len(request_ids):
        if latest:
            waiting.extend(reversed(latest))
        return list(host.finish_requests(request_ids, Status.FINISHED_ABORTED))
    host.waiting = FCFSRequestQueue()
    try:
        return list(host.finish_requests(request_ids, Status.FINISHED_ABORTED))
    finally:
        host.waiting = waiting


@contextmanager
def narrowed(host: Any, planned: Iterable[str]) -> Iterator[None]:
    """Show vLLM's scheduler `host` only the planned requests, in their order, within the block.

    Without a KV connector it sees all that hold blocks while they wait, planned or not: sessions
    whose next input has come.

    Afterwards every request is where vLLM would have left it: the running ones in the order of
    admission, then those that started, and those that vLLM preempted at the front of the queue.
    """
    running, waiting, holding = host.running, host.waiting, host.kv_holding_waiting
    held = set(holding)
    shown, startable = _split(host, planned)
    num_shown = len(shown)
    host.running = shown
    host.waiting = FCFSRequestQueue(request for request in startable if request not in held)
    if host.connector is not None:
        host.kv_holding_waiting = FCFSRequestQueue(each for each in startable if each in held)
    manager = host.kv_cache_manager
    reserves_whole, watermark = host.scheduler_reserve_full_isl, manager.watermark_blocks
    # The policy has decided whether a prompt may start.
    host.scheduler_reserve_full_isl, manager.watermark_blocks = False, 0
    try:
        yield
    finally:
        host.scheduler_reserve_full_isl, manager.watermark_blocks = reserves_whole, watermark
        # nearly always, and there may be hundreds of decodes
        if not startable and len(host.running) == num_shown:
            host.running, host.waiting = running, waiting
            host.kv_holding_waiting = holding
        else:
            if host.connector is not None:
                _put_back_loads(host, waiting, holding, held)
            _put_back(host, running, waiting, startable)


def _split(host: Any, planned: Iterable[str]) -> tuple[list[Any], dict[Any, None]]:
    """Return vLLM's requests of a plan, in its order: those that run, and those that start."""
    requests = list(map(host.requests.__getitem__, planned))
    if requests == host.running:  # often; a list compares the same objects at once
        return requests, {}
    shown = [request for request in requests if request.status is _RUNNING]
    if len(shown) == len(requests):
        return shown, {}
    return shown, {request: None for request in requests if request.status is not _RUNNING}


def _put_back(host: Any, running: list[Any], waiting: Any, startable: Mapping[Any, None]) -> None:
    """Restore vLLM's `running` and `waiting` after it started or preempted some requests."""
    left, ran = host.waiting, set(running)
    started = [request for request in host.running if request not in ran]
    host.running = [request for request in running if request.status is _RUNNING] + started
    host.waiting = waiting
    if len(started) <= _FEW and isinstance(waiting, FCFSRequestQueue):
        for request in started:  # vLLM's way makes a queue of thousands anew
            with suppress(ValueError):  # it was in the queue of those that hold blocks
                waiting.remove(request)
    elif started:
        waiting.remove_requests(set(started))
    for request in reversed([request for request in left if request not in startable]):
        waiting.prepend_request(request)


def _put_back_loads(host: Any, waiting: Any, holding: Any, held: set[Any]) -> None:
    """Restore vLLM's queue of requests that hold blocks while they wait, `held` until now.

    It gains those whose load began, and loses those that run or have lost what was loaded.
    """
    begun = [request for request in host.kv_holding_waiting if request not in held]
    lost = [request for request in host.waiting if request in held]
    if begun:
        waiting.remove_requests(set(begun))
    holding.remove_requests({*lost, *(each for each in held if each.status is _RUNNING)})
    for request in begun:
        holding.add_request(request)
    for request in lost:
        host.waiting.remove_request(request)
    for request in reversed(lost):
        waiting.prepend_request(request)
    host.kv_holding_waiting = holding
