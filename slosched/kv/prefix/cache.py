"""The prefix cache of a KV cache: full blocks are shared by requests that begin alike."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

from slosched.core import BlockCopy, BlockLedger, Request, ScheduledChunk
from slosched.kv.checks import KVCorruptionError
from slosched.kv.ledger import SharedLedger
from slosched.kv.pool import BlockPool, OutOfBlocksError
from slosched.kv.prefix.forecast import Forecast
from slosched.kv.prefix.hash_index import HashIndex
from slosched.kv.prefix.host_tier import HostTier
from slosched.kv.prefix.off import NoPrefixCache
from slosched.kv.prefix.sharing import SharedBlocks


class PrefixCache(NoPrefixCache):
    """A prefix cache in which a block is found once the step that fills it has ended.

    A block that no request holds any more stays cached until its room is needed.
    """

    def __init__(self, blocks: SharedBlocks, pool: BlockPool, tables: dict[str, list[int]]) -> None:
        super().__init__(pool, tables)
        self._blocks = blocks
        self.index = blocks.index

    def take(self, count: int) -> list[int]:
        num_short = count - self._pool.num_free
        if num_short > 0:
            num_free = self._pool.num_free + self.index.num_evictable
            if count > num_free:
                raise OutOfBlocksError(f"{count} KV blocks wanted, {num_free} are free")
            self._pool.give_back(self._blocks.evict(num_short))
        return self._pool.take(count)

    def ledger(self) -> BlockLedger:
        return SharedLedger(self._blocks, self._tables)

    def leave(self, request_id: str, table: Sequence[int], *, at_end: bool) -> Sequence[int]:
        return self._blocks.leave(request_id, table, at_end=at_end)

    def may_share(self, request_id: str) -> bool:
        return self._blocks.follows(request_id)

    def forget(self, request_id: str) -> None:
        self._blocks.forget(request_id)

    def watch(self, request: Request) -> None:
        self._blocks.watch(request)

    def refresh(self) -> Iterable[tuple[str, int]]:
        size = self._blocks.block_size
        return [(request_id, num * size) for request_id, num in self._blocks.refresh()]

    def start(self, request_id: str, num_tokens: int | None = None) -> None:
        num_blocks = None if num_tokens is None else num_tokens // self._blocks.block_size
        self._tables[request_id], _ = self._blocks.start(request_id, num_blocks)

    def start_all(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self.start(request_id)

    def note_computed(self, chunks: Sequence[ScheduledChunk]) -> None:
        for request, num_new, num_prior, _, _ in chunks:
            table = self._tables.get(request.request_id)
            # Of a request that has left its blocks, the table may be another's of the same id.
            if table is not None and request.end_reason is None:
                spare = self._blocks.note_computed(request.request_id, num_prior + num_new, table)
                self._pool.give_back(reversed(spare))

    def settle_ends(self) -> None:
        self._blocks.settle_ends()

    def drop_unheld(self) -> None:
        self._pool.give_back(self._blocks.evict(self.index.num_evictable))

    def flush(self) -> None:
        self.settle_ends()
        self.drop_unheld()
        self._blocks.clear_host()


class TieredPrefixCache(PrefixCache):
    """A prefix cache with a second tier: what the device evicts stays in host memory."""

    copies_to_host = True

    def __init__(
        self,
        blocks: SharedBlocks,
        pool: BlockPool,
        tables: dict[str, list[int]],
        host: HostTier,
        first_host_block: int,
    ) -> None:
        """`first_host_block` is the number that an executor gives to the first block of `host`."""
        super().__init__(blocks, pool, tables)
        self._host = host
        self._first_host_block = first_host_block
        self._to_load: dict[str, list[int]] = {}
        """Host blocks of requests that have started, for `load_started`."""
        self._loads: list[BlockCopy] = []

    def check(self) -> None:
        if not self._host.is_sound():
            raise KVCorruptionError("the prefix cache's blocks on the host do not add up")

    def start(self, request_id: str, num_tokens: int | None = None) -> None:
        num_blocks = None if num_tokens is None else num_tokens // self._blocks.block_size
        self._tables[request_id], on_host = self._blocks.start(request_id, num_blocks)
        if on_host:
            self._to_load[request_id] = on_host

    def start_all(self, request_ids: Iterable[str]) -> None:
        super().start_all(request_ids)
        self.load_started()

    def load_started(self) -> None:
        """Take device blocks for what the requests that have started find in host memory."""
        for request_id, on_host in self._to_load.items():
            device = self.take(len(on_host))
            self._tables[request_id] += device
            self._loads += self._copies(zip(device, on_host, strict=True))
        self._to_load.clear()

    def take_copies(self) -> tuple[Sequence[BlockCopy], Sequence[BlockCopy]]:
        loads, self._loads = self._loads, []
        return self._copies(self._host.take_writes()), loads

    def counting_on(self, requests: Container[Request]) -> Sequence[str]:  # noqa: ARG002
        return self._host.pinning

    def on_failed_step(self, requests: Iterable[Request]) -> None:  # noqa: ARG002
        """Forget what is on the host: the step may have failed before its copies."""
        self._blocks.clear_host()

    def _copies(self, pairs: Iterable[tuple[int, int]]) -> list[BlockCopy]:
        """Return copies from pairs of a device block and a block of the host tier."""
        first = self._first_host_block
        return [BlockCopy(device, first + host) for device, host in pairs]


class PlannedPrefixCache(PrefixCache):
    """A prefix cache in which a block is found as soon as a step is planned that fills it.

    There is no host tier.  Steps run in the order in which they are planned, so what a later step
    finds has been computed when it begins, unless a step has failed.
    """

    def __init__(
        self,
        blocks: SharedBlocks,
        index: HashIndex,
        pool: BlockPool,
        tables: dict[str, list[int]],
    ) -> None:
        super().__init__(blocks, pool, tables)
        self._hash_index = index

    def ledger(self) -> BlockLedger:
        return Forecast(self._blocks, self._hash_index, self._tables, self._pool.num_free)

    def note_planned(self, chunks: Iterable[ScheduledChunk]) -> None:
        blocks, full_at = self._blocks, self._blocks.full_at
        for request, num_new, num_prior, _, _ in chunks:
            request_id, num_tokens = request.request_id, num_prior + num_new
            if num_tokens >= full_at.get(request_id, 0):
                num_known = request.num_tokens - request.num_output_placeholders
                table = self._tables[request_id]
                blocks.fill(request_id, min(num_tokens, num_known), table, by=request)

    def note_computed(self, chunks: Sequence[ScheduledChunk]) -> None:
        unfinished, size = self._blocks.unfinished, self._blocks.block_size
        if not unfinished.is_empty:
            for request, num_new, num_prior, _, _ in chunks:
                unfinished.note_computed(request, (num_prior + num_new) // size)
        super().note_computed(chunks)

    def counting_on(self, requests: Container[Request]) -> Sequence[str]:
        blocks = frozenset(self._blocks.unfinished.of(requests))
        return [name for name, table in self._tables.items() if not blocks.isdisjoint(table)]

    def on_failed_step(self, requests: Iterable[Request]) -> None:
        """Discard the unfinished blocks that no request holds."""
        blocks = self._blocks.unfinished.note_failed(requests)
        self._pool.give_back(self._blocks.discard(blocks))
