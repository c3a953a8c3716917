"""SGLang's own KV cache around our radix tree, for replaying what SGLang decided.

slosched's prefix cache keeps and drops other prefixes than SGLang's: it knows blocks by hash, keeps
those of decodes that were retracted, evicts only as much as is short.  Which prefixes are there
decides what SGLang admits.  So here is a cache that does as SGLang's does, at the times at which it
does it; queues, plans and their check are those of the real Scheduler.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from slosched.batch import BatchBuilder
from slosched.core import Request, ScheduledBatch, ScheduledChunk, SchedulerOutput, SchedulerView
from slosched.kv import KVCache
from slosched.kv.radix import Node, RadixTree
from slosched.policy._sglang_adder import AddResult, PrefillAdder
from slosched.policy._sglang_order import MAX_WAITING_FOR_PREFIXES, content, sort_depth_first
from slosched.policy._sglang_requests import has_ended
from slosched.policy.sglang import SchedulePolicy, SGLang


class Step(NamedTuple):
    """One that runs."""

    prompts: frozenset[str]
    wasted: list[int]


class RadixKV(KVCache):
    """Pages of one token; `SGLangHere` and `settle` tell it when SGLang would do what."""

    shares_prefixes = True

    def __init__(self, num_tokens: int) -> None:
        super().__init__(num_tokens, block_size=1)
        self.tree = RadixTree()
        self.num_kept = 0
        """Decodes of which some may be retracted, or driven out, in this step."""
        self._requests: dict[str, Request] = {}
        self._node: dict[str, Node] = {}
        self._num_in_tree: dict[str, int] = {}
        self.launched = Step(frozenset(), [])
        self._in_flight: list[int] = []
        """Slots of tokens that somebody who was retracted is about to emit."""

    @property
    def num_free_blocks(self) -> int:
        return self._device.num_free + self.tree.num_evictable_tokens

    @property
    def num_empty_blocks(self) -> int:
        return self._device.num_free

    def ledger(self) -> RadixKV:
        return self

    def watch(self, request: Request) -> None:
        self._requests[request.request_id] = request
        request.num_computed_tokens = 0

    def match(self, request: Request, num_tokens: int) -> None:
        """Look for its first tokens, as SGLang does when it sorts and when it tries."""
        ids = content(request)[0][:num_tokens]
        request.num_computed_tokens, node = self.tree.match(ids, request.lora_id)
        self._node[request.request_id] = node

    def nodes_of(self, requests: Iterable[Request]) -> list[Node]:
        """Where the prefixes end that were found last."""
        return [self._node[request.request_id] for request in requests]

    def num_ready_blocks(self, request_id: str) -> int:
        if request_id in self._tables:
            return len(self._tables[request_id])
        cached = self._requests[request_id].num_computed_tokens
        if not cached:
            return 0
        return cached - self.tree.num_unprotected_tokens(self._node[request_id])

    def num_blocks_to_load(self, request_id: str) -> int:
        return 0

    def find(self, request_id: str, planned: Mapping[str, int], num_lent: int = 0) -> None:
        return None

    def start(self, request_id: str) -> None:
        """Called when the plan admits it, and again when the plan is carried out."""
        if request_id not in self._tables:
            num_tokens, node = (
                self._requests[request_id].num_computed_tokens,
                self._node[request_id],
            )
            self.tree.lock(node)
            self._tables[request_id] = self.tree.blocks_of(node) if num_tokens else []
            self._num_in_tree[request_id] = num_tokens

    def leave(self, request_id: str) -> int:
        """Retract or drive out: nothing of it is kept that was not in the tree before."""
        if request_id not in self._tables:
            return 0
        before = self.num_free_blocks
        self._release(request_id)
        if self.num_kept:
            self.num_kept -= 1
            self.need(20 * self.num_kept)
            self.need(self.num_kept)
        return self.num_free_blocks - before

    def need(self, num_tokens: int, num_taken: int = 0) -> None:
        """Evict as many as are needed, not as many as are short."""
        if self._device.num_free - num_taken < num_tokens:
            self._device.give_back(self.tree.evict(num_tokens))

    def launch(self, prompts: Iterable[Request], num_wasted: int) -> None:
        """A step begins; some of its slots are for tokens that nobody wants any more."""
        names = frozenset(request.request_id for request in prompts)
        self.launched = Step(names, self._device.take(num_wasted))

    def free(self, request_id: str) -> None:
        """Whoever ends is released by `settle`, whoever is retracted was by `leave`."""

    def forget(self, request_id: str) -> None:
        pass

    def note_computed(self, chunks: Iterable[ScheduledChunk]) -> None:
        pass

    def settle(self, batch: ScheduledBatch, step: Step) -> None:
        """What SGLang does with the results of a step, request by request."""
        for request, num_new, num_prior, emits_token, _ in batch.chunks:
            request_id = request.request_id
            if request.status.is_ended:
                table = self._tables.pop(request_id)
                ids = content(request)[0][: request.num_tokens - 1]
                num_known = self.tree.insert(ids, table, request.lora_id)
                self._device.give_back(table[self._num_in_tree.pop(request_id) : num_known])
                self.tree.unlock(self._node.pop(request_id))
            elif emits_token and request_id in step.prompts and request_id in self._tables:
                self.keep(request, num_prior + num_new)
        self._device.give_back(step.wasted + self._in_flight)
        self._in_flight = []

    def keep(self, request: Request, num_tokens: int) -> None:
        """Its first tokens are cached from now on, and of two copies one is dropped."""
        request_id, ids = request.request_id, content(request)[0][:num_tokens]
        table, num_before = self._tables[request_id], self._num_in_tree[request_id]
        num_known = self.tree.insert(ids, table, request.lora_id)
        self._device.give_back(table[num_before:num_known])
        num_tokens, node = self.tree.match(ids, request.lora_id)
        self.tree.unlock(self._node[request_id])
        self.tree.lock(node)
        self._node[request_id], self._num_in_tree[request_id] = node, num_tokens
        table[:num_tokens] = self.tree.blocks_of(node)

    def _release(self, request_id: str) -> None:
        table, num_shared = self._tables.pop(request_id), self._num_in_tree.pop(request_id)
        if self._requests[request_id].num_output_placeholders:
            self._in_flight.append(table.pop())
        self._device.give_back(table[num_shared:])
        self.tree.unlock(self._node.pop(request_id))


class MatchingAdder(PrefillAdder):
    """Looks for a prompt's prefix when it is tried; all but its last token may be cached."""

    kv: RadixKV

    def add(self, request: Request) -> AddResult:
        self.kv.match(request, request.num_tokens - 1)
        return super().add(request)


class SGLangHere(SGLang):
    """The policy, which tells the cache what SGLang's own steps do to it besides the plan."""

    kv: RadixKV
    finishing: dict[str, Request]
    """Of the scheduler: their last token is coming."""
    retracted: list[str]
    """In the last step."""
    lost: list[Request]
    """Of those, they had been finishing: SGLang throws that token away and computes them anew."""
    sorted: Counter[str]
    """How often `dfs-weight` found SGLang's order, which sorts what is equal by its own tree."""

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
        """Of the step that was planned last."""
        last = self._queues.last
        mixed = set(map(id, self._mixed))
        return [r for r in last.requests if last.is_prefill and id(r) not in mixed]

    def _prefill(self, batch: BatchBuilder, view: SchedulerView) -> bool:
        self._mixed: list[Request] = []
        if not super()._prefill(batch, view):
            return False
        num_tokens = sum(batch.num_scheduled_tokens[r.request_id] for r in self.prompts())
        self.kv.need(num_tokens)
        if self._mixed:
            self.kv.need(len(self._mixed), num_tokens)
        return True

    def _mix(self, batch: BatchBuilder) -> list[Request]:
        self._mixed = super()._mix(batch)
        return self._mixed

    def _decode(self, batch: BatchBuilder, view: SchedulerView) -> bool:
        self.kv.num_kept = sum(not has_ended(r) for r in self._queues.running)
        if self.kv.num_kept:
            self.kv.need(self.kv.num_kept)
        is_planned = super()._decode(batch, view)
        self.kv.num_kept = 0
        return is_planned

    def _release(self, batch: BatchBuilder, victim: Request) -> None:
        self.retracted.append(victim.request_id)
        super()._release(batch, victim)
        if victim.request_id in self.finishing:
            self.lost.append(victim)
            batch.num_free_blocks += self.kv.leave(victim.request_id)
            self._queues.waiting.append(victim)

    def _drive_out_for(self, request: Request, adder: PrefillAdder) -> list[Request]:
        self.kv.num_kept = len(self._queues.running)
        victims = super()._drive_out_for(request, adder)
        self.kv.num_kept = 0
        return victims

    def _sort(self, waiting: list[Request]) -> None:
        by_prefix = self.schedule_policy in (SchedulePolicy.LPM, SchedulePolicy.DFS_WEIGHT)
        by_prefix &= len(waiting) <= MAX_WAITING_FOR_PREFIXES
        if by_prefix:
            for request in waiting:
                self.kv.match(request, request.num_tokens)
        found = waiting.copy()
        super()._sort(waiting)
        if by_prefix and self.schedule_policy is SchedulePolicy.DFS_WEIGHT:
            ours = waiting.copy()
            waiting[:] = found
            sort_depth_first(waiting, self.kv.nodes_of(waiting), self.kv.tree)
            self.sorted["like SGLang" if ours == waiting else "but for ties"] += 1

    def _make_adder(self, batch: BatchBuilder, view: SchedulerView) -> PrefillAdder:
        adder = MatchingAdder.__new__(MatchingAdder)
        vars(adder).update(vars(super()._make_adder(batch, view)), kv=self.kv)
        return adder
