"""Block tables of all requests, on the device and in host swap space."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from slosched.core import BlockCopy, BlockLedger
from slosched.kv.checks import KVCorruptionError, check_pool
from slosched.kv.eviction.ranked_cache import RankedBlocks, RankedPrefixCache
from slosched.kv.eviction.ranked_index import RankedIndex
from slosched.kv.pool import BlockPool
from slosched.kv.prefix.cache import PlannedPrefixCache, PrefixCache, TieredPrefixCache
from slosched.kv.prefix.groups import GroupPrefixCache
from slosched.kv.prefix.hash_index import HashIndex
from slosched.kv.prefix.host_tier import NO_PREFIX_HOST, HostTier, NoHostTier, PrefixHost
from slosched.kv.prefix.index import PrefixIndex
from slosched.kv.prefix.merged import MergedBlocks, MergedPrefixCache
from slosched.kv.prefix.merged_index import MergedIndex
from slosched.kv.prefix.off import NoPrefixCache
from slosched.kv.prefix.sharing import SharedBlocks


class KVCache:
    """A paged KV cache: a request's tokens live in the blocks of its table, in order.

    Invariant, for each of the two pools: free + lent + held = total, and no block is held twice.

    With a `prefix_index`, full blocks are shared by requests that begin alike.  They stay cached
    when no request holds them any more, until their room is needed: they count as free.  Then on
    the device empty + cached + lent + held = total, where a block that several requests hold counts
    once.  Without one, only the members of a group share the blocks of their prompt.  With a
    `prefix_host`, what the device evicts of them stays in further blocks of host
    memory, which are numbered after those for swapping.
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
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_host_blocks = num_host_blocks
        self._device = BlockPool(num_blocks)
        self._host = BlockPool(num_host_blocks)
        self._tables: dict[str, list[int]] = {}
        self._host_tables: dict[str, list[int]] = {}
        self._lent: list[int] = []
        self.caches_prefixes = prefix_index is not None
        self.prefixes = self._prefix_cache(prefix_index, prefix_host)
        """What requests share; without a prefix index it says that they share nothing."""

    def _prefix_cache(self, index: PrefixIndex | None, host: PrefixHost) -> NoPrefixCache:
        if index is None:
            if host.num_blocks:
                raise ValueError(
                    f"{host.num_blocks} host blocks for what a prefix cache evicts, but there "
                    "is no prefix cache: choose one, or set them to 0"
                )
            return NoPrefixCache(self._device, self._tables)
        if host.num_blocks:
            tier, first = HostTier(host, index), self.num_host_blocks
            blocks = _shared_blocks(index, self.block_size, tier)
            return TieredPrefixCache(blocks, self._device, self._tables, tier, first)
        blocks = _shared_blocks(index, self.block_size, NoHostTier())
        if not isinstance(index, HashIndex):
            return PrefixCache(blocks, self._device, self._tables)
        kind = PlannedPrefixCache
        if isinstance(index, MergedIndex):
            kind = MergedPrefixCache
        elif isinstance(index, RankedIndex):
            kind = RankedPrefixCache
        return kind(blocks, index, self._device, self._tables)

    def share_in_groups(self, shares: bool) -> None:
        """Let the members of groups share their prompts' blocks, or end that once none are left.

        With a prefix cache they always do, as all requests do.
        """
        if self.caches_prefixes:
            return
        if shares:
            self.prefixes = GroupPrefixCache(self.block_size, self._device, self._tables)
        else:
            self.prefixes.drop_unheld()
            self.prefixes = NoPrefixCache(self._device, self._tables)

    @property
    def num_free_blocks(self) -> int:
        """Return the number of device blocks that can be taken: empty ones and cached ones."""
        return self._device.num_free + self.prefixes.index.num_evictable

    @property
    def num_free_host_blocks(self) -> int:
        """Return the number of free host blocks for swapped requests."""
        return self._host.num_free

    @property
    def used_fraction(self) -> float:
        """Return the share of the device blocks that are not free."""
        return 1 - self.num_free_blocks / self.num_blocks

    def num_held_blocks(self, request_id: str) -> int:
        """Return the number of blocks that the request holds on the device."""
        table = self._tables.get(request_id)
        return len(table) if table else 0

    def num_held_host_blocks(self, request_id: str) -> int:
        """Return the number of blocks that the request, which is swapped out, holds on the host."""
        table = self._host_tables.get(request_id)
        return len(table) if table else 0

    def fits_alone(self, num_tokens: int) -> bool:
        """Tell whether a request of `num_tokens` tokens fits into the empty cache."""
        return -(-num_tokens // self.block_size) <= self.num_blocks

    @property
    def block_tables(self) -> Mapping[str, list[int]]:
        """Return the blocks of each request on the device, in the order of its tokens.

        The mapping and its lists are live: read them and keep none.
        """
        return self._tables

    def grow(self, request_id: str, num_tokens: int) -> list[int]:
        """Make room for the request's first `num_tokens` tokens and return its block table."""
        table = self._tables.get(request_id)
        if table is None:
            table = self._tables[request_id] = []
        missing = -(-num_tokens // self.block_size) - len(table)
        if missing > 0:
            table.extend(self.prefixes.take(missing))
        return table

    def shrink(self, request_id: str, num_tokens: int) -> None:
        """Give back the blocks of a request beyond its first `num_tokens` tokens.

        They must not be shared: they held draft tokens that were rejected.
        """
        table = self._tables[request_id]
        num_kept = -(-num_tokens // self.block_size)
        if len(table) > num_kept:
            self._device.give_back(reversed(table[num_kept:]))
            del table[num_kept:]

    def lend(self, count: int) -> None:
        """Take `count` blocks from the free ones, for `grow_lent` to use later."""
        self._lent += self.prefixes.take(count)

    def grow_lent(self, request_id: str, num_tokens: int) -> None:
        """`grow` a request that has a table, by blocks that were lent before."""
        table = self._tables[request_id]
        missing = -(-num_tokens // self.block_size) - len(table)
        if missing > 0:
            if missing > len(self._lent):
                raise KVCorruptionError(f"{request_id!r} grows by blocks that were not lent")
            table += self._lent[-missing:]
            del self._lent[-missing:]

    def free(self, request_id: str) -> None:
        """Give back all blocks of the request, on the device and on the host."""
        self._free(request_id, at_end=False)

    def forget(self, request_id: str) -> None:
        """`free` a request that has ended; what it computed may stay in the prefix cache."""
        self._free(request_id, at_end=True)
        self.prefixes.forget(request_id)

    def swap_out(self, request_id: str) -> list[BlockCopy]:
        """Move the request's table to the host and return the copies that this takes."""
        held = len(self._tables[request_id])
        host = self._host.take(held)
        self._host_tables[request_id] = host
        device = self._leave(request_id, at_end=False)
        self.prefixes.note_swapped_out(request_id)
        return [BlockCopy(*pair) for pair in zip(device, host, strict=True)]

    def swap_in(self, request_id: str) -> list[BlockCopy]:
        """Move the request's table back to the device and return the copies that this takes.

        Blocks that a prefix cache gives the request when it starts need no copy.
        """
        if request_id not in self._tables:
            self.prefixes.start(request_id)
        num_found = self.num_held_blocks(request_id)
        device = self.prefixes.take(len(self._host_tables[request_id]) - num_found)
        host = self._host_tables.pop(request_id)
        self._tables[request_id] = [*self._tables.get(request_id, ()), *device]
        self._host.give_back(reversed(host))
        return [BlockCopy(*pair) for pair in zip(device, host[num_found:], strict=True)]

    def ledger(self) -> BlockLedger:
        """Return the account of what a plan in the making does to the free blocks."""
        return self.prefixes.ledger()

    def check(self) -> None:
        """Raise KVCorruptionError unless every block is accounted for."""
        check_pool("device", self._device, self._tables, self._lent, self.prefixes.index.blocks())
        check_pool("host", self._host, self._host_tables, [], {})
        self.prefixes.check()

    def _free(self, request_id: str, *, at_end: bool) -> None:
        self._leave(request_id, at_end=at_end)
        self._host.give_back(reversed(self._host_tables.pop(request_id, ())))

    def _leave(self, request_id: str, *, at_end: bool) -> Sequence[int]:
        """Take the request's table away and return it."""
        table = self._tables.pop(request_id, [])
        self._device.give_back(reversed(self.prefixes.leave(request_id, table, at_end=at_end)))
        return table


def _shared_blocks(index: PrefixIndex, block_size: int, host: NoHostTier) -> SharedBlocks:
    if isinstance(index, MergedIndex):
        return MergedBlocks(index, block_size, host)
    if isinstance(index, RankedIndex):
        return RankedBlocks(index, block_size, host)
    return SharedBlocks(index, block_size, host)
