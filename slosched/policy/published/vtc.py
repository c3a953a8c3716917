"""VTC: the client that was served least goes first, by a counter of tokens."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from heapq import heapify, heappop, heapreplace
from operator import attrgetter

from slosched.batch import BatchBuilder
from slosched.core import DecodeGroup, Request, SchedulerView, heeding, tunable
from slosched.policy.kit.checks import check_at_least
from slosched.policy.kit.decode_first import StallFree, add_prefills
from slosched.policy.kit.drop import Drop

_MOST_CLIENTS = 10_000
"""Clients whose counters are kept: they may name themselves, so that new ones may come for ever."""


class Client(StrEnum):
    """The requests that share one counter."""

    TIER = "tier"
    """Requests with the same TTFT and TPOT in their SLOs."""
    LORA = "lora"
    """Requests that use the same LoRA adapter, as in the paper's code."""
    PRIORITY = "priority"
    """Requests of the same priority."""
    TENANT = "tenant"
    """Requests of the same tenant."""

    @property
    def key(self) -> Callable[[Request], Hashable]:
        """Return the function that gives the client of a request."""
        match self:
            case Client.TIER:
                return attrgetter("slo.ttft_s", "slo.tpot_s")
            case Client.LORA:
                return attrgetter("lora_id")
            case Client.PRIORITY:
                return attrgetter("priority")
            case Client.TENANT:
                return attrgetter("tenant")


@dataclass
class VTC(StallFree):
    """Every decode, then prompts of the client with the smallest virtual token counter.

    1. When a client begins to wait, its counter is lifted to the smallest counter of the waiting
       clients or, if there are none, to that of the client that stopped waiting last.  A client
       thus earns no credit while it is idle.
    2. While tokens and KV cache last, the earliest request of the client with the smallest counter
       starts, and the counter grows by its prompt.  A request that does not fit keeps all others
       out, but one that only lacks a LoRA slot is passed over.
    3. The counter also grows with each output token of the client, those of accepted drafts
       included, which are known when the next step is planned.

    VTC neither preempts nor rejects.  The counters of two clients that always have requests waiting
    differ by at most 2 * max(prompt price * longest prompt, output price * tokens of a full cache).

    Source: Virtual Token Counter (OSDI '24, arXiv 2401.00588), algorithm 2; code of the authors'
    artifact (`Ying1123/VTC-artifact`, `vtc_req_queue.py` at 14c19b7: `served` → `_counters`,
    `input_price`, `output_price`).  There a client is a LoRA adapter.  Few requests
    say their tenant, so by default a client is a tier, the requests with one SLO; see `client`.
    Chunks are Sarathi's, and a prompt is paid for when it starts.  Of more than 10,000 clients
    those that were served least are forgotten while they idle.  Left out: weights of clients,
    the profiled cost function, and the variants that predict or know the output length.
    """

    client: Client = heeding(
        Client.TIER,
        {Client.LORA: "lora_id", Client.PRIORITY: "priority", Client.TENANT: "tenant"},
    )
    prompt_price: float = 1.0
    """w_p: what a prompt token adds to the counter."""
    output_price: float = 2.0
    """w_q: what an output token adds."""
    token_budget: int = tunable(512, 128, 256, 1024, 2048)
    drop: Drop = tunable(Drop.NEVER, Drop.EXPIRED, Drop.INFEASIBLE)

    def __post_init__(self) -> None:
        check_at_least(1, token_budget=self.token_budget)
        check_at_least(0, prompt_price=self.prompt_price, output_price=self.output_price)
        self.reset()

    def reset(self) -> None:
        self._client_of = self.client.key
        self._counters: dict[Hashable, float] = {}
        self._waited: frozenset[Hashable] = frozenset()
        """Clients that still had a waiting request when the last step had been planned."""
        self._last_left: Hashable = None
        """The client that stopped waiting last."""
        self._emitted: list[tuple[Request, int]] = []
        """Requests that emitted in the last step, and the output tokens that they have paid for."""

    def new_batch(self, view: SchedulerView, beside: DecodeGroup | None = None) -> BatchBuilder:
        return BatchBuilder(view, beside=beside, token_budget=self.token_budget)

    def add_prompts(
        self,
        batch: BatchBuilder,
        view: SchedulerView,
        begun: Sequence[Request],
        waiting: Sequence[Request],
        beside: DecodeGroup | None,
    ) -> None:
        """Add the prompts that have begun, then those whose turn it is; charge their clients."""
        self._pay(self._more_than_paid())
        queues = self._queues(view.waiting)
        add_prefills(batch, begun, reserved_blocks=batch.blocks_promised(begun))
        started = self._start(batch, queues if waiting else {}, batch.blocks_promised(begun))
        self._waited = frozenset(client for client, queue in queues.items() if queue)
        emits = self._emitting(batch, (*view.running, *view.swapped, *started))
        self._emitted = [(request, request.num_output_tokens + 1) for request in emits]
        emitting = Counter(map(self._client_of, emits))
        if beside is not None:
            emitting.update(beside.num_by(self._client_of))
        self._pay(emitting)

    def _queues(self, waiting: Sequence[Request]) -> dict[Hashable, deque[Request]]:
        """Return waiting requests by client; lift the counters of clients that begin to wait."""
        queues: dict[Hashable, deque[Request]] = {}
        for request, client in zip(waiting, map(self._client_of, waiting), strict=True):
            queue = queues.get(client)
            if queue is None:
                queues[client] = deque((request,))
            else:
                queue.append(request)
        counters = self._counters
        present = [client for client in queues if client in self._waited]
        for client in queues:
            if client in self._waited:
                continue
            least = min((counters[other] for other in present), default=None)
            if least is None:
                least = counters.get(self._last_left, 0.0)
            counters[client] = max(counters.get(client, 0.0), least)
            present.append(client)
        if len(counters) > _MOST_CLIENTS:
            self._forget_idle(queues)
        return queues

    def _forget_idle(self, queues: Container[Hashable]) -> None:
        """Forget those who were served least of the clients that do not wait.

        Who comes again then begins as one who never came.
        """
        counters = self._counters
        idle = [c for c in counters if c not in queues and c != self._last_left]
        idle.sort(key=counters.__getitem__)
        for client in idle[: len(counters) - _MOST_CLIENTS // 2]:
            del counters[client]

    def _start(
        self, batch: BatchBuilder, queues: Mapping[Hashable, deque[Request]], reserved_blocks: int
    ) -> list[Request]:
        """Start requests in turn and charge their prompts; return those that start."""
        started: list[Request] = []
        for client, request in self._in_turn(batch, queues):
            if batch.num_free_tokens <= 0:
                break
            if not batch.admit(request, reserved_blocks=reserved_blocks):
                break
            started.append(request)
            reserved_blocks += batch.blocks_promised((request,))
            queues[client].remove(request)
            self._last_left = client
            if not request.num_preemptions:  # what is computed anew was paid for
                self._counters[client] += self.prompt_price * request.num_prompt_tokens
        return started

    def _in_turn(
        self, batch: BatchBuilder, queues: Mapping[Hashable, deque[Request]]
    ) -> Iterator[tuple[Hashable, Request]]:
        """Yield the earliest request of the client whose counter is smallest at that moment.

        Requests that lack a LoRA slot are passed over.
        """
        turns = [
            (self._counters[client], place, client, iter(tuple(queue)))
            for place, (client, queue) in enumerate(queues.items())
        ]
        heapify(turns)
        while turns:
            _, place, client, requests = turns[0]
            request = next(filter(batch.has_lora_slot, requests), None)
            if request is None:
                heappop(turns)
                continue
            yield client, request
            heapreplace(turns, (self._counters[client], place, client, requests))

    def _emitting(self, batch: BatchBuilder, requests: Iterable[Request]) -> list[Request]:
        """Return the requests that emit a token in the step."""
        scheduled = batch.num_scheduled_tokens
        return [
            request
            for request in requests
            if scheduled.get(request.request_id) == request.num_uncomputed_tokens
        ]

    def _more_than_paid(self) -> Counter[Hashable]:
        """Return by client the tokens of the last step beyond one a request: accepted drafts."""
        more: Counter[Hashable] = Counter()
        for request, num_paid in self._emitted:
            if request.num_output_tokens > num_paid:
                more[self._client_of(request)] += request.num_output_tokens - num_paid
        return more

    def _pay(self, emitting: Mapping[Hashable, int]) -> None:
        """Charge output tokens to their clients."""
        for client, num in emitting.items():
            self._counters[client] = self._counters.get(client, 0.0) + self.output_price * num
