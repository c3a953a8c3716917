"""SGLang's own KV cache around slosched's radix tree, to replay SGLang's decisions.

slosched's prefix cache keeps and drops other prefixes than SGLang's.  It identifies blocks by hash,
keeps those of retracted decodes, and evicts only as much as is missing.  SGLang's admission depends
on which prefixes are cached.  So this cache does what SGLang's does, at the times at which SGLang
does it.  Queues, plans and their check are those of the real Scheduler.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import NamedTuple

from slosched.batch import BatchBuilder
from slosched.core import Request, ScheduledBatch, SchedulerOutput, SchedulerView
from slosched.kv import KVCache
from slosched.kv.ledger import HoldsAll
from slosched.kv.prefix.off import NoPrefixCache
from slosched.kv.prefix.radix import Node, RadixTree
from slosched.policy.engines.sglang.adder import AddResult, PrefillAdder
from slosched.policy.engines.sglang.order import content, sort_depth_first
from slosched.policy.engines.sglang.policy import SchedulePolicy, SGLang
from slosched.policy.engines.sglang.requests import has_ended

BY_PREFIX = (
    *(SchedulePolicy.LPM, SchedulePolicy.DFS_WEIGHT),
    *(SchedulePolicy.HRRN, SchedulePolicy.SHORTEST_PREFILL_FIRST),
)


class Step(NamedTuple):
    """A running step."""

    prompts: frozenset[str]
    wasted: list[int]


class RadixKV(HoldsAll, KVCache):
    """A KV cache whose blocks are pages; `SGLangHere` and `settle` tell it when SGLang would act."""

    def __init__(self, num_tokens: int, page_size: int = 1) -> None:
        super().__init__(num_tokens // page_size, page_size)
        self.prefixes = RadixPrefixes(self)
        self.tree = RadixTree(page_size)
        self.kept: list[Request] = []
        """Decodes of which some may be retracted or preempted in this step."""
        self._requests: dict[str, Request] = {}
        self._node: dict[str, Node] = {}
        self._num_in_tree: dict[str, int] = {}
        self.launched = Step(frozenset(), [])
        self._in_flight: list[int] = []
        """Slots of tokens that retracted requests are about to emit."""

    @property
    def num_free_blocks(self) -> int:
        return self._device.num_free + self.tree.num_evictable_tokens // self.block_size

    @property
    def num_empty_tokens(self) -> int:
        return self._device.num_free * self.block_size

    def ledger(self) -> RadixKV:
        return self

    def watch(self, request: Request) -> None:
        self._requests[request.request_id] = request
        request.num_computed_tokens = 0

    def match(self, request: Request, num_tokens: int) -> None:
        """Look up the request's first tokens, as SGLang does when it sorts and when it tries it."""
        ids = content(request)[0][:num_tokens]
        request.num_computed_tokens, node = self.tree.match(ids, request.lora_id)
        self._node[request.request_id] = node

    def nodes_of(self, requests: Iterable[Request]) -> list[Node]:
        """Return the nodes where the last found prefixes end."""
        return [self._node[request.request_id] for request in requests]

    def num_ready_blocks(self, request_id: str) -> int:
        if request_id in self._tables:
            return len(self._tables[request_id])
        cached = self._requests[request_id].num_computed_tokens
        if not cached:
            return 0
        num_free = self.tree.num_unprotected_tokens(self._node[request_id])
        return (cached - num_free) // self.block_size

    def num_blocks_to_load(self, request_id: str) -> int:
        return 0

    def find(self, request_id: str, planned: Mapping[str, int], num_lent: int = 0) -> None:
        return None

    def start(self, request_id: str) -> None:
        """Start the request; called when the plan admits it, and again when the plan is carried
        out."""
        if request_id not in self._tables:
            num_tokens, node = (
                self._requests[request_id].num_computed_tokens,
                self._node[request_id],
            )
            self.tree.lock(node)
            self._tables[request_id] = self.tree.blocks_of(node) if num_tokens else []
            self._num_in_tree[request_id] = num_tokens // self.block_size

    def leave(self, request_id: str) -> int:
        """Retract or preempt the request; keep nothing of it that was not in the tree before."""
        if request_id not in self._tables:
            return 0
        before = self.num_free_blocks
        self._release(request_id)
        if self.kept:
            self.kept = [r for r in self.kept if r.request_id != request_id]
            self.need(20 * len(self.kept))
            self.need_for_decodes()
        return self.num_free_blocks - before

    def need(self, num_tokens: int, num_taken: int = 0) -> None:
        """Evict as many tokens as are needed, not as many as are missing."""
        if self.num_empty_tokens - num_taken < num_tokens:
            self._device.give_back(chain(*self.tree.evict(num_tokens)))

    def need_for_prompts(self, num_tokens: int, num_prompts: int) -> None:
        """Evict for prompts; with longer pages, as if each took one page more."""
        self.need(num_tokens + (num_prompts * self.block_size if self.block_size > 1 else 0))

    def need_for_decodes(self) -> None:
        """Evict for the kept decodes, for each one that begins a page."""
        starts = [r for r in self.kept if r.num_computed_tokens % self.block_size == 0]
        self.need(len(starts) * self.block_size)

    def launch(self, prompts: Iterable[Request], num_wasted: int) -> None:
        """Begin a step; `num_wasted` of its slots are for tokens that are not needed any more."""
        names = frozenset(request.request_id for request in prompts)
        self.launched = Step(names, self._device.take(num_wasted))

    def free(self, request_id: str) -> None:
        """Do nothing: `settle` releases ended requests, and `leave` has released retracted ones."""

    def forget(self, request_id: str) -> None:
        pass

    def settle(self, batch: ScheduledBatch, step: Step) -> None:
        """Do what SGLang does with the results of a step, request by request."""
        for request, num_new, num_prior, emits_token, _ in batch.chunks:
            request_id = request.request_id
            if request.status.is_ended:
                table = self._tables.pop(request_id)
                ids = content(request)[0][: request.num_tokens - 1]
                num_known = self.tree.insert(ids, table, request.lora_id) // self.block_size
                twins = table[self._num_in_tree.pop(request_id) : num_known]
                self._device.give_back(twins + table[len(ids) // self.block_size :])
                self.tree.unlock(self._node.pop(request_id))
            elif emits_token and request_id in step.prompts and request_id in self._tables:
                self.keep(request, num_prior + num_new)
        self._device.give_back(step.wasted + self._in_flight)
        self._in_flight = []

    def keep(self, request: Request, num_tokens: int) -> None:
        """Cache the request's first tokens, and drop one of two copies."""
        request_id, ids = request.request_id, content(request)[0][:num_tokens]
        table, num_before = self._tables[request_id], self._num_in_tree[request_id]
        num_known = self.tree.insert(ids, table, request.lora_id) // self.block_size
        self._device.give_back(table[num_before:num_known])
        num_tokens, node = self.tree.match(ids, request.lora_id)
        self.tree.unlock(self._node[request_id])
        self.tree.lock(node)
        num_pages = num_tokens // self.block_size
        self._node[request_id], self._num_in_tree[request_id] = node, num_pages
        table[:num_pages] = self.tree.blocks_of(node)

    def _release(self, request_id: str) -> None:
        table, num_shared = self._tables.pop(request_id), self._num_in_tree.pop(request_id)
        if self._requests[request_id].num_output_placeholders:
            self._in_flight.append(table.pop())
        self._device.give_back(table[num_shared:])
        self.tree.unlock(self._node.pop(request_id))


class RadixPrefixes(NoPrefixCache):
    """The interface through which slosched's Scheduler reports to `RadixKV`."""

    def __init__(self, kv: RadixKV) -> None:
        super().__init__(kv._device, kv._tables)
        self._kv = kv

    def watch(self, request: Request) -> None:
        self._kv.watch(request)

    def start_all(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._kv.start(request_id)


class MatchingAdder(PrefillAdder):
    """Looks up a prompt's prefix when it is tried; all but its last token may be cached."""

    kv: RadixKV

    def add(self, request: Request) -> AddResult:
        self.kv.match(request, request.num_tokens - 1)
        return super().add(request)


class SGLangHere(SGLang):
    """The policy, which also tells the cache what SGLang's steps do to it besides the plan."""

    kv: RadixKV
    finishing: dict[str, Request]
    """Requests of the scheduler whose last token is coming."""
    retracted: list[str]
    """Requests that were retracted in the last step."""
    lost: list[Request]
    """Requests that were retracted while finishing: SGLang discards the token and recomputes it."""
    sorted: Counter[str]
    """Number of times that `dfs-weight` gave SGLang's order, which breaks ties by its own tree."""

    def schedule(self, view: SchedulerView) -> SchedulerOutput:
        self.retracted, self.lost = [], []
        chunked = self._queues.chunked
        if chunked is not None:
            self.kv.keep(chunked, chunked.num_computed_tokens)
        output = super().schedule(view)
        last = self._queues.last
        wasted = [r for r in last.requests if r.request_id not in output.num_scheduled_tokens]
        self.kv.launch(self.prompts(), len(wasted))
        return output

    def reset(self) -> None:
        super().reset()
        self.sorted = Counter()

    def prompts(self) -> list[Request]:
        """Return the prompts of the step that was planned last."""
        last = self._queues.last
        mixed = set(map(id, self._mixed))
        return [r for r in last.requests if last.is_prefill and id(r) not in mixed]

    def _prefill(self, batch: BatchBuilder, view: SchedulerView) -> bool:
        self._mixed: list[Request] = []
        if not super()._prefill(batch, view):
            return False
        prompts = self.prompts()
        new = [(r.num_computed_tokens, batch.num_scheduled_tokens[r.request_id]) for r in prompts]
        self.kv.need_for_prompts(sum(n for _, n in new), len(prompts))
        if self._mixed:
            size = self.kv.block_size
            num_taken = sum(-(-(prior + n) // size) - -(-prior // size) for prior, n in new) * size
            self.kv.need(len(self._mixed) * size, num_taken)
        return True

    def _mix(self, batch: BatchBuilder) -> list[Request]:
        self._mixed = super()._mix(batch)
        return self._mixed

    def _decode(self, batch: BatchBuilder, view: SchedulerView) -> bool:
        self.kv.kept = [r for r in self._queues.running if not has_ended(r)]
        if self.kv.kept:
            self.kv.need_for_decodes()
        is_planned = super()._decode(batch, view)
        self.kv.need(len(self._queues.running) * self.kv.block_size)
        self.kv.kept = []
        return is_planned

    def _release(self, batch: BatchBuilder, victim: Request) -> None:
        self.retracted.append(victim.request_id)
        super()._release(batch, victim)
        if victim.request_id in self.finishing:
            self.lost.append(victim)
            batch.num_free_blocks += self.kv.leave(victim.request_id)
            self._queues.waiting.append(victim)

    def _drive_out_for(self, request: Request, adder: PrefillAdder) -> list[Request]:
        self.kv.kept = list(self._queues.running)
        victims = super()._drive_out_for(request, adder)
        self.kv.kept = []
        return victims

    def _sort(self, waiting: list[Request]) -> None:
        if self.schedule_policy in BY_PREFIX:
            for request in waiting:
                self.kv.match(request, request.num_tokens)
        found = waiting.copy()
        super()._sort(waiting)
        if self.schedule_policy is SchedulePolicy.DFS_WEIGHT:
            ours = waiting.copy()
            waiting[:] = found
            sort_depth_first(waiting, self.kv.nodes_of(waiting), self.kv.tree)
            self.sorted["like SGLang" if ours == waiting else "but for ties"] += 1

    def _make_adder(self, batch: BatchBuilder, view: SchedulerView) -> PrefillAdder:
        adder = MatchingAdder.__new__(MatchingAdder)
        vars(adder).update(vars(super()._make_adder(batch, view)), kv=self.kv)
        return adder
