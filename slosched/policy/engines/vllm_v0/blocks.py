"""vLLM V0's block manager (version 2): the blocks that vLLM would hold for each request.

It allocates all blocks of a prompt when the prompt is admitted, and lookahead slots beyond the
known tokens.  The KV cache of slosched holds blocks for computed tokens only.  So vLLM never counts
more blocks as free than there are, and its decisions can be carried out unchanged.

With prefix caching, vLLM allocates full blocks of equal content once, whether or not they are
computed.  In slosched's KV cache (`--prefix-cache merged`), two requests that compute the same
block have one each until the end of the step.  Only within a step can vLLM therefore count more
blocks as free than there are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import islice

from slosched.core import KVView, Request, RequestStatus, SchedulerView
from slosched.core.merged_blocks import BlockNames


class AllocStatus(Enum):
    """The answer to a prompt that asks for its blocks: now, later or never."""

    OK = auto()
    LATER = auto()
    NEVER = auto()


@dataclass(slots=True)
class BlockTable:
    """The blocks that vLLM holds for one request, on the device or in host memory."""

    num_slots: int
    """Tokens that have a slot: all known ones of a prompt, the computed ones of a decode."""
    num_blocks: int
    num_found_tokens: int = 0
    """Tokens that the request found in the prefix cache and has not scheduled yet."""
    num_restarts: int = 0
    """How often the request had lost its KV cache when it got these blocks."""


class BlockManager:
    """The free blocks and block tables of one step; the next step gets its `tables`."""

    def __init__(
        self,
        view: SchedulerView,
        tables: Mapping[str, BlockTable],
        *,
        watermark: float,
        num_lookahead_slots: int,
    ) -> None:
        """Take over the last step's `tables`; derive missing ones, drop those of ended requests."""
        kv = view.kv
        self._block_size = kv.block_size
        self._num_blocks = kv.num_blocks
        self._num_watermark_blocks = int(watermark * kv.num_blocks)
        self._num_lookahead_slots = num_lookahead_slots
        # vLLM then requires that a step's tokens be whole blocks, which is impossible with fewer
        # than one.
        caches = view.limits.max_num_batched_tokens >= kv.block_size
        ledger = kv.ledger()
        self._num_ready_blocks = ledger.num_ready_blocks
        self._block_names = ledger if caches and isinstance(ledger, BlockNames) else None
        self.caches_prefixes = self._block_names is not None
        """True if requests share blocks as V0's do."""
        self._more: Counter[Hashable] = Counter()
        """Holders by block name: those that vLLM counts minus those in the KV cache."""
        self.tables = _tables_of(view.running, tables, kv)
        self.num_free_blocks = kv.num_free_blocks
        for request, (request_id, table) in zip(view.running, self.tables.items(), strict=True):
            num_held = ledger.num_ready_blocks(request_id)
            if table.num_slots > request.num_computed_tokens or table.num_blocks != num_held:
                self._book_what_is_not_held(request, table, num_held)
        self.tables |= _tables_of(view.swapped, tables, kv)

    def num_left(self, request: Request) -> int:
        """Return the tokens that vLLM has not scheduled, including those it will find cached."""
        if not self.caches_prefixes:
            return request.num_uncomputed_tokens
        if request.status is RequestStatus.WAITING:
            return request.num_tokens
        return request.num_uncomputed_tokens + self.tables[request.request_id].num_found_tokens

    def is_prefill(self, request: Request) -> bool:
        """Tell whether some tokens are not computed that were known when `request` was admitted."""
        return self.tables[request.request_id].num_slots == request.num_tokens

    def holds_all(self, request: Request) -> bool:
        """Tell whether the request holds all blocks of the cache."""
        return self.tables[request.request_id].num_blocks >= self._num_blocks

    def can_allocate(self, request: Request) -> AllocStatus:
        """Return whether the blocks of all its tokens are free with the watermark left free.

        vLLM drops a request that has grown so long that it can never get them.  Here, a request
        that has emitted tokens is not dropped, and may go below the watermark.
        """
        need = self._blocks_for(request.num_tokens)
        watermark = self._num_watermark_blocks
        if self._num_blocks - need < watermark:
            if not request.num_output_tokens:
                return AllocStatus.NEVER
            watermark = 0
        enough = self.num_free_blocks - need >= watermark
        return AllocStatus.OK if enough else AllocStatus.LATER

    def allocate(self, request: Request) -> None:
        """Allocate the blocks of all tokens that the request has so far."""
        need = self._blocks_for(request.num_tokens)
        table = BlockTable(request.num_tokens, need, num_restarts=_num_restarts(request))
        self.tables[request.request_id] = table
        self._book(request.request_id, table)

    def can_append_slots(self, request: Request) -> bool:
        """Tell whether a new block is free for each to be written, even if the last has room."""
        table = self.tables[request.request_id]
        return self._num_touched(request, table) <= self.num_free_blocks

    def append_slots(self, request: Request) -> None:
        """Allocate a slot for the newest token, and the lookahead slots after it."""
        table = self.tables[request.request_id]
        slots = request.num_tokens + self._lookahead(request, table)
        missing = self._blocks_for(slots) - table.num_blocks
        if missing > 0:
            # There can be fewer only for lookahead slots, which `can_swap_in` does not count in
            # full.
            missing = max(0, min(missing, self.num_free_blocks))
            table.num_blocks += missing
            self.num_free_blocks -= missing
        before, table.num_slots = table.num_slots, request.num_tokens
        if table.num_slots // self._block_size > before // self._block_size:
            self._merge_filled(request.request_id, table, before // self._block_size)

    def append_to_decodes(self, requests: Iterable[Request], most: int) -> list[Request]:
        """Append slots for the plain decodes at the front, `most` at most, and return them.

        Hundreds pass here in every step, so this avoids a call for each.  It stops at a request
        that needs `append_slots`: for lookahead slots, or for a block that becomes full and may be
        shared.
        """
        decodes: list[Request] = []
        tables, size, num_free = self.tables, self._block_size, self.num_free_blocks
        last_place = size - 1 if self.caches_prefixes else size
        for request in islice(requests, 0 if self._num_lookahead_slots else most):
            table = tables[request.request_id]
            slots, capacity = table.num_slots, table.num_blocks * size
            if (
                num_free < 1
                or request.num_computed_tokens != slots
                or request.num_prompt_tokens + request.num_output_tokens != slots + 1
                or capacity < slots
                or slots % size == last_place
                or table.num_found_tokens
            ):
                break
            if capacity == slots:
                table.num_blocks += 1
                num_free -= 1
            table.num_slots = slots + 1
            decodes.append(request)
        self.num_free_blocks = num_free
        return decodes

    def leave(self, request: Request, num_freed_blocks: int) -> None:
        """Free a victim's blocks, of which the KV cache frees `num_freed_blocks`.

        A request that is swapped out keeps its table.  If equal blocks have no names, the remaining
        ones are held by other requests, or were allocated here and never taken from the KV cache.
        """
        table = self.tables[request.request_id]
        if not self.caches_prefixes:
            num_never_taken = table.num_blocks - self._num_ready_blocks(request.request_id)
            self.num_free_blocks += num_freed_blocks + num_never_taken
            return
        names = self._names(request.request_id, table.num_slots)
        self._more.subtract(names)
        num_still_held = sum(map(self._is_held, names))
        self.num_free_blocks += table.num_blocks - num_still_held

    def forget(self, request: Request) -> None:
        """Drop the table of a request that leaves this step's plan; the next step derives it."""
        del self.tables[request.request_id]

    def can_swap_in(self, request: Request) -> bool:
        """Tell whether its full blocks and those to be written are free above the watermark.

        vLLM waits forever if that is more than the whole cache has, or drops the request.  Here the
        request comes back when no other request holds a block.
        """
        table = self.tables[request.request_id]
        full = table.num_slots // self._block_size
        full -= sum(map(self._is_held, self._names(request.request_id, table.num_slots)))
        need = min(self._num_touched(request, table) + full, self._num_blocks)
        watermark = self._num_watermark_blocks
        if self._num_blocks - need < watermark:
            watermark = 0
        return self.num_free_blocks - need >= watermark

    def swap_in(self, request: Request) -> None:
        """Allocate the blocks of its table on the device again."""
        self._book(request.request_id, self.tables[request.request_id])

    def _book(self, request_id: str, table: BlockTable, first: int = 0) -> None:
        """Allocate a table's blocks from index `first` on; those that others hold are shared."""
        names = self._names(request_id, table.num_slots)[first:]
        self.num_free_blocks -= table.num_blocks - first - sum(map(self._is_held, names))
        self._more.update(names)

    def _book_what_is_not_held(self, request: Request, table: BlockTable, num_held: int) -> None:
        """Allocate what the KV cache lacks: a prompt's uncomputed blocks, lookahead slots."""
        if not self.caches_prefixes:
            self.num_free_blocks += num_held - table.num_blocks
            return
        num_shared = len(self._names(request.request_id, request.num_computed_tokens))
        self.num_free_blocks += num_held - num_shared
        self._book(request.request_id, table, num_shared)

    def _merge_filled(self, request_id: str, table: BlockTable, first: int) -> None:
        """Free the request's own blocks that are full now and equal to blocks of others."""
        names = self._names(request_id, table.num_slots)[first:]
        self.num_free_blocks += sum(map(self._is_held, names))
        self._more.update(names)

    def _names(self, request_id: str, num_slots: int) -> Sequence[Hashable]:
        return () if self._block_names is None else self._block_names.names(request_id, num_slots)

    def _is_held(self, name: Hashable) -> bool:
        assert self._block_names is not None
        return self._block_names.num_holders(name) + self._more[name] > 0

    def _num_touched(self, request: Request, table: BlockTable) -> int:
        size = self._block_size
        new = request.num_tokens - table.num_slots + self._lookahead(request, table)
        room = size - table.num_slots % size
        return 1 + -((room - new) // size)

    def _lookahead(self, request: Request, table: BlockTable) -> int:
        return self._num_lookahead_slots if table.num_slots < request.num_tokens else 0

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)


def _tables_of(
    requests: Iterable[Request], tables: Mapping[str, BlockTable], kv: KVView
) -> dict[str, BlockTable]:
    found: dict[str, BlockTable] = {}
    for request in requests:
        request_id = request.request_id
        table = tables.get(request_id)
        if (
            table is None
            or table.num_slots < request.num_computed_tokens
            or table.num_restarts != _num_restarts(request)
        ):
            table = _derived(request, kv)
        found[request_id] = table
    return found


def _derived(request: Request, kv: KVView) -> BlockTable:
    """Return a table for a request of another policy, or for a decode that was in a group since."""
    slots = request.num_computed_tokens if request.is_decode else request.num_tokens
    return BlockTable(slots, -(-slots // kv.block_size), num_restarts=_num_restarts(request))


def _num_restarts(request: Request) -> int:
    return request.num_preemptions - request.num_swaps
