"""vLLM V0's block manager (version 2): which blocks it would hold.

It books a prompt's blocks as a whole when the prompt is admitted, and lookahead slots beyond the
known tokens; the KV cache of slosched holds blocks for computed tokens only.  So what vLLM believes
to be free is never more than what is, and its decisions are carried out as they are.

With prefix caching it books full blocks of equal content once, whether or not they are computed.
In slosched's KV cache (`--prefix-cache merged`) two that compute the same have a block each until
the end of the step: only within one can vLLM believe in more free blocks than there are.
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
    """Whether a prompt gets its blocks."""

    OK = auto()
    LATER = auto()
    NEVER = auto()


@dataclass(slots=True)
class BlockTable:
    """What vLLM holds for one request, on the device or in host memory."""

    num_slots: int
    """Tokens that were given a slot: all known ones of a prompt, of a decode those computed."""
    num_blocks: int
    num_found_tokens: int = 0
    """Tokens that it found in the prefix cache, and has not scheduled yet."""


class BlockManager:
    """Free blocks and block tables in one step; `tables` are to be handed to that of the next."""

    def __init__(
        self,
        view: SchedulerView,
        tables: Mapping[str, BlockTable],
        *,
        watermark: float,
        num_lookahead_slots: int,
    ) -> None:
        """`tables` as the step before left them; what is unknown is derived, what is gone goes."""
        kv = view.kv
        self._block_size = kv.block_size
        self._num_blocks = kv.num_blocks
        self._num_held_blocks = kv.num_held_blocks
        self._num_watermark_blocks = int(watermark * kv.num_blocks)
        self._num_lookahead_slots = num_lookahead_slots
        # vLLM asks that a step's tokens be whole blocks then; not with fewer than one.
        caches = view.limits.max_num_batched_tokens >= kv.block_size
        ledger = kv.ledger()
        self._block_names = ledger if caches and isinstance(ledger, BlockNames) else None
        self.caches_prefixes = self._block_names is not None
        """True if requests share blocks as V0's do."""
        self._more: Counter[Hashable] = Counter()
        """Holders by name that vLLM would have booked, and the KV cache has not, or fewer."""
        self.tables = _tables_of(view.running, tables, kv)
        self.num_free_blocks = kv.num_free_blocks
        for request, (request_id, table) in zip(view.running, self.tables.items(), strict=True):
            num_held = kv.num_held_blocks(request_id)
            if table.num_slots > request.num_computed_tokens or table.num_blocks != num_held:
                self._book_what_is_not_held(request, table, num_held)
        self.tables |= _tables_of(view.swapped, tables, kv)

    def num_left(self, request: Request) -> int:
        """Tokens that vLLM has not scheduled: also those that it will find in the cache."""
        if not self.caches_prefixes:
            return request.num_uncomputed_tokens
        if request.status is RequestStatus.WAITING:
            return request.num_tokens
        return request.num_uncomputed_tokens + self.tables[request.request_id].num_found_tokens

    def is_prefill(self, request: Request) -> bool:
        """True until all tokens are computed that were known when `request` was admitted."""
        return self.tables[request.request_id].num_slots == request.num_tokens

    def holds_all(self, request: Request) -> bool:
        """True if there is no other block in the cache."""
        return self.tables[request.request_id].num_blocks >= self._num_blocks

    def can_allocate(self, request: Request) -> AllocStatus:
        """Whether the blocks of all its tokens can be had and the watermark be left free.

        vLLM drops a request that has grown until it can never get them; one that has emitted
        tokens is not dropped here, but may go below the watermark.
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
        """Book the blocks of all its known tokens."""
        need = self._blocks_for(request.num_tokens)
        table = self.tables[request.request_id] = BlockTable(request.num_tokens, need)
        self._book(request.request_id, table)

    def can_append_slots(self, request: Request) -> bool:
        """Whether every block that is touched could be a new one, also where it has room."""
        table = self.tables[request.request_id]
        return self._num_touched(request, table) <= self.num_free_blocks

    def append_slots(self, request: Request) -> None:
        """Book a slot for the newest token, and the lookahead slots after it."""
        table = self.tables[request.request_id]
        slots = request.num_tokens + self._lookahead(request, table)
        missing = self._blocks_for(slots) - table.num_blocks
        if missing > 0:
            # Fewer only for lookahead slots, of which `can_swap_in` does not see all.
            missing = max(0, min(missing, self.num_free_blocks))
            table.num_blocks += missing
            self.num_free_blocks -= missing
        before, table.num_slots = table.num_slots, request.num_tokens
        if table.num_slots // self._block_size > before // self._block_size:
            self._merge_filled(request.request_id, table, before // self._block_size)

    def append_to_decodes(self, requests: Iterable[Request], most: int) -> list[Request]:
        """`append_slots` for as many from the front as are plain decodes, `most` at most.

        Hundreds pass here in every step; they are booked without a further call.  Left to
        `append_slots` are lookahead slots, and a block that is full now and may be shared.
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
        """Give a victim's blocks back, of which the KV cache frees `num_freed_blocks`.

        Swapped out it keeps its table.  Where equal blocks have no names, the others are held by
        somebody else, or were booked and never taken.
        """
        table = self.tables[request.request_id]
        if not self.caches_prefixes:
            num_never_taken = table.num_blocks - self._num_held_blocks(request.request_id)
            self.num_free_blocks += num_freed_blocks + num_never_taken
            return
        names = self._names(request.request_id, table.num_slots)
        self._more.subtract(names)
        num_still_held = sum(map(self._is_held, names))
        self.num_free_blocks += table.num_blocks - num_still_held

    def forget(self, request: Request) -> None:
        """It has no part in the step after all; what it holds is derived in the next."""
        del self.tables[request.request_id]

    def can_swap_in(self, request: Request) -> bool:
        """Whether its full blocks and those to be touched are free above the watermark.

        vLLM waits for ever for more than the whole cache can give, or drops the request; here it
        comes back when nobody else holds a block.
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
        """Book its table on the device again."""
        self._book(request.request_id, self.tables[request.request_id])

    def _book(self, request_id: str, table: BlockTable, first: int = 0) -> None:
        """The blocks of a table from this one on, those that others have booked but once."""
        names = self._names(request_id, table.num_slots)[first:]
        self.num_free_blocks -= table.num_blocks - first - sum(map(self._is_held, names))
        self._more.update(names)

    def _book_what_is_not_held(self, request: Request, table: BlockTable, num_held: int) -> None:
        """Of a prompt what is not computed yet, and lookahead slots."""
        if not self.caches_prefixes:
            self.num_free_blocks += num_held - table.num_blocks
            return
        num_shared = len(self._names(request.request_id, request.num_computed_tokens))
        self.num_free_blocks += num_held - num_shared
        self._book(request.request_id, table, num_shared)

    def _merge_filled(self, request_id: str, table: BlockTable, first: int) -> None:
        """Blocks of its own that are full now, and given back where others have the same."""
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
        if table is None or table.num_slots < request.num_computed_tokens:
            table = _derived(request, kv)
        found[request_id] = table
    return found


def _derived(request: Request, kv: KVView) -> BlockTable:
    """Of a request that another policy has admitted, or a decode that was one of a group since."""
    slots = request.num_computed_tokens if request.is_decode else request.num_tokens
    return BlockTable(slots, -(-slots // kv.block_size))
