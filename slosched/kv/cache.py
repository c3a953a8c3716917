"""Block tables of all requests, on the device and in host swap space."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence

from slosched.core import BlockCopy, BlockLedger, BlockNames, Request, ScheduledChunk
from slosched.kv.checks import KVCorruptionError, check_pool
from slosched.kv.ledger import OwnBlocks, SharedLedger
from slosched.kv.pool import BlockPool, OutOfBlocksError
from slosched.kv.prefix.forecast import Forecast
from slosched.kv.prefix.hash_index import HashIndex
from slosched.kv.prefix.host_tier import NO_PREFIX_HOST, HostTier, PrefixHost
from slosched.kv.prefix.index import PrefixIndex
from slosched.kv.prefix.sharing import SharedBlocks


class KVCache:
    """Paged KV cache: a request's tokens live in the blocks of its table, in order.

    Invariant, for each of the two pools: free + lent + held = total, and no block is held twice.

    With a `prefix_index`, full blocks are shared by requests that begin alike, and stay cached when
    nobody holds them any more, until their room is needed: they count as free.  Then on the device
    empty + cached + lent + held = total, where a block that several hold counts once.  With a
    `prefix_host` what the device evicts of them stays in further blocks in host memory, which are
    numbered after those for swapping.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int = 16,
        num_host_blocks: int = 0,
        prefix_index: PrefixIndex | None = None,
        prefix_host: PrefixHost = NO_PREFIX_HOST,
    ) -> None:
        if num_blocks < 1:
            raise ValueError(f"the KV cache needs at least one block, not {num_blocks}")
        if block_size < 1:
            raise ValueError(f"a KV block holds at least one token, not {block_size}")
        self.block_size = block_size
        self._device = BlockPool(num_blocks)
        self._host = BlockPool(num_host_blocks)
        self._tables: dict[str, list[int]] = {}
        self._host_tables: dict[str, list[int]] = {}
        self._lent: list[int] = []
        self._index = prefix_index
        if prefix_host.num_blocks and prefix_index is None:
            raise ValueError(
                f"{prefix_host.num_blocks} host blocks for what a prefix cache evicts, but there "
                "is no prefix cache: choose one, or set them to 0"
            )
        self._host_tier = None
        if prefix_index is not None and prefix_host.num_blocks:
            self._host_tier = HostTier(prefix_host, prefix_index)
        self._shared = None
        if prefix_index is not None:
            self._shared = SharedBlocks(prefix_index, block_size, self._host_tier)
        self._to_load: dict[str, list[int]] = {}
        """Host blocks of who has started, for `load_started`."""
        self._loads: list[BlockCopy] = []

    @property
    def num_blocks(self) -> int:
        return self._device.num_blocks

    @property
    def num_host_blocks(self) -> int:
        return self._host.num_blocks

    @property
    def shares_prefixes(self) -> bool:
        return self._shared is not None

    @property
    def block_names(self) -> BlockNames | None:
        """Of blocks that become one where they are equal, found as soon as they are planned."""
        shared = self._shared
        if shared is None or shared.unfinished is None or not shared.index.merges:
            return None
        return shared

    @property
    def num_free_blocks(self) -> int:
        if self._index is None:
            return self._device.num_free
        return self._device.num_free + self._index.num_evictable

    @property
    def num_cached_blocks(self) -> int:
        """Of the free blocks, those whose content may be wanted again."""
        return 0 if self._index is None else self._index.num_evictable

    @property
    def num_free_host_blocks(self) -> int:
        return self._host.num_free

    @property
    def used_fraction(self) -> float:
        return 1 - self.num_free_blocks / self._device.num_blocks

    def num_held_blocks(self, request_id: str) -> int:
        table = self._tables.get(request_id)
        return len(table) if table else 0

    def num_held_host_blocks(self, request_id: str) -> int:
        table = self._host_tables.get(request_id)
        return len(table) if table else 0

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def fits_alone(self, num_tokens: int) -> bool:
        """True if a request of `num_tokens` tokens fits into the empty cache."""
        return self.num_blocks_for(num_tokens) <= self.num_blocks

    @property
    def block_tables(self) -> Mapping[str, list[int]]:
        """Of all requests that hold blocks on the device.  Live: read, never keep."""
        return self._tables

    def block_table(self, request_id: str) -> list[int]:
        """The blocks of the request's tokens, in order.  A live list: read, never keep."""
        return self._tables[request_id]

    def grow(self, request_id: str, num_tokens: int) -> list[int]:
        """Make room for the request's first `num_tokens` tokens; returns its block table."""
        table = self._tables.get(request_id)
        if table is None:
            table = self._tables[request_id] = []
        missing = -(-num_tokens // self.block_size) - len(table)
        if missing > 0:
            table.extend(self._take(missing))
        return table

    def lend(self, count: int) -> None:
        """Take blocks from the free ones for whoever will `grow_lent` by them later."""
        self._lent += self._take(count)

    def grow_lent(self, request_id: str, num_tokens: int) -> None:
        """`grow` a request that has a table by blocks that were lent before."""
        table = self._tables[request_id]
        missing = -(-num_tokens // self.block_size) - len(table)
        if missing > 0:
            if missing > len(self._lent):
                raise KVCorruptionError(f"{request_id!r} grows by blocks that were not lent")
            table += self._lent[-missing:]
            del self._lent[-missing:]

    def free(self, request_id: str) -> None:
        """Give back all that the request holds, on the device and on the host."""
        self._free(request_id, at_end=False)

    def _free(self, request_id: str, *, at_end: bool) -> None:
        self._leave(request_id, at_end=at_end)
        self._host.give_back(reversed(self._host_tables.pop(request_id, ())))

    def swap_out(self, request_id: str) -> list[BlockCopy]:
        """Move the request's table to the host; the copies that make it true."""
        held = len(self._tables[request_id])
        host = self._host.take(held)
        self._host_tables[request_id] = host
        device = self._leave(request_id, at_end=False)
        if self._shared is not None and self.block_names is not None:
            self._shared.watch_swapped(request_id)
        return [BlockCopy(*pair) for pair in zip(device, host, strict=True)]

    def swap_in(self, request_id: str) -> list[BlockCopy]:
        """Move the request's table back to the device; the copies that make it true.

        What is cached there of it, where equal blocks become one, is not copied.
        """
        if self._shared is not None and request_id not in self._tables:
            self.start(request_id)
        num_found = self.num_held_blocks(request_id)
        device = self._take(len(self._host_tables[request_id]) - num_found)
        host = self._host_tables.pop(request_id)
        self._tables[request_id] = [*self._tables.get(request_id, ()), *device]
        self._host.give_back(reversed(host))
        return [BlockCopy(*pair) for pair in zip(device, host[num_found:], strict=True)]

    def ledger(self) -> BlockLedger:
        """For a plan in the making: which blocks it would free and take."""
        if self._shared is None:
            return OwnBlocks(self.num_held_blocks)
        if isinstance(self._index, HashIndex) and self._host_tier is None:
            return Forecast(self._shared, self._index, self._tables, self._device.num_free)
        return SharedLedger(self._shared, self._tables)

    def watch(self, request: Request) -> None:
        """`request` waits from now on: `refresh_matches` tells how much of it is cached."""
        if self._shared is not None:
            self._shared.watch(request)

    def refresh_matches(self) -> Iterable[tuple[str, int]]:
        """Waiting requests, and how many of their tokens are cached, where it has changed."""
        if self._shared is None:
            return ()
        size, swapped = self.block_size, self._host_tables
        return [
            (request_id, num_blocks * size)
            for request_id, num_blocks in self._shared.refresh()
            if request_id not in swapped
        ]

    def start(self, request_id: str, num_tokens: int | None = None) -> None:
        """With a prefix cache: who waits or is swapped out holds what is cached of it from now on.

        `num_tokens`, if given, are those that the plan has found when its turn came.
        """
        assert self._shared is not None
        num_blocks = None if num_tokens is None else num_tokens // self.block_size
        self._tables[request_id], on_host = self._shared.start(request_id, num_blocks)
        if on_host:
            self._to_load[request_id] = on_host

    def load_started(self) -> None:
        """Take device blocks for what those that have started find on the host."""
        for request_id, on_host in self._to_load.items():
            device = self._take(len(on_host))
            self._tables[request_id] += device
            pairs = zip(device, self._numbered(on_host), strict=True)
            self._loads += [BlockCopy(*pair) for pair in pairs]
        self._to_load.clear()

    def take_copies(self) -> tuple[list[BlockCopy], list[BlockCopy]]:
        """What the prefix cache wants copied in the next step: to the host, and then from it."""
        if self._host_tier is None:
            return [], []
        loads, self._loads = self._loads, []
        writes = self._host_tier.take_writes()
        to_host = self._numbered(host for _, host in writes)
        return [BlockCopy(d, h) for (d, _), h in zip(writes, to_host, strict=True)], loads

    @property
    def loading(self) -> Sequence[str]:
        """Requests that have started with what the host has, in steps that have not ended yet."""
        return () if self._host_tier is None else self._host_tier.pinning

    def clear_prefix_host(self) -> None:
        """A step has failed, maybe before its copies, and whoever was `loading` has ended."""
        if self._shared is not None:
            self._shared.clear_host()

    def note_planned(self, chunks: Iterable[ScheduledChunk]) -> None:
        """A step will compute these; steps that are planned from now on run after it.

        So their full blocks may be found by others, as far as their tokens are known.
        """
        if self._shared is None or self._shared.unfinished is None:
            return
        full_at = self._shared.full_at
        for request, num_new, num_prior, _, _ in chunks:
            request_id, num_tokens = request.request_id, num_prior + num_new
            if num_tokens >= full_at.get(request_id, 0):
                num_known = request.num_tokens - request.num_output_placeholders
                table = self._tables[request_id]
                self._shared.fill(request_id, min(num_tokens, num_known), table, by=request)

    def note_computed(self, chunks: Iterable[ScheduledChunk]) -> None:
        """The tokens of these have been computed; full blocks are from now on there for others.

        A request that has left its blocks in the meantime has none to share; those of that name
        may be another's by now.
        """
        if self._shared is None:
            return
        unfinished = self._shared.unfinished
        for request, num_new, num_prior, _, _ in chunks:
            if unfinished is not None:
                unfinished.note_computed(request, (num_prior + num_new) // self.block_size)
            table = self._tables.get(request.request_id)
            if table is not None and request.end_reason is None:
                spare = self._shared.note_computed(request.request_id, num_prior + num_new, table)
                self._device.give_back(reversed(spare))

    def spoilt_by(self, requests: Container[Request]) -> list[str]:
        """Who counts on blocks that the steps of these were to compute."""
        if self._shared is None or self._shared.unfinished is None:
            return []
        blocks = frozenset(self._shared.unfinished.of(requests))
        return [name for name, table in self._tables.items() if not blocks.isdisjoint(table)]

    def discard_unfinished(self, requests: Iterable[Request]) -> None:
        """A step of these has failed, and all who count on their blocks have ended.

        What nobody holds of all that was not computed is no longer found.
        """
        if self._shared is not None and self._shared.unfinished is not None:
            blocks = self._shared.unfinished.note_failed(requests)
            self._device.give_back(self._shared.discard(blocks))

    def forget(self, request_id: str) -> None:
        """The request has ended; what it has computed stays cached."""
        self._free(request_id, at_end=True)
        if self._shared is not None:
            self._shared.forget(request_id)

    def settle_ends(self) -> None:
        """A step is over: who ended in it counts as having left in the order of the starts."""
        if self._shared is not None:
            self._shared.settle_ends()

    def check(self) -> None:
        """Raise KVCorruptionError unless every block is accounted for."""
        cached = {} if self._index is None else self._index.blocks()
        check_pool("device", self._device, self._tables, self._lent, cached)
        check_pool("host", self._host, self._host_tables, [], {})
        if self._host_tier is not None and not self._host_tier.is_sound():
            raise KVCorruptionError("the prefix cache's blocks on the host do not add up")

    def _numbered(self, blocks: Iterable[int]) -> list[int]:
        """Of the prefix cache's host blocks: their numbers among all host blocks."""
        return [self._host.num_blocks + block for block in blocks]

    def _take(self, count: int) -> list[int]:
        """Blocks without content first, then those that were left longest ago."""
        short = count - self._device.num_free
        if short > 0 and self._shared is not None:
            if count > self.num_free_blocks:
                raise OutOfBlocksError(f"{count} KV blocks wanted, {self.num_free_blocks} are free")
            self._device.give_back(self._shared.evict(short))
        return self._device.take(count)

    def _leave(self, request_id: str, *, at_end: bool) -> Sequence[int]:
        """Take the request's table away; what it was."""
        table = self._tables.pop(request_id, [])
        own = (
            table if self._shared is None else self._shared.leave(request_id, table, at_end=at_end)
        )
        self._device.give_back(reversed(own))
        return table
