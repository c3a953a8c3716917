"""Block tables of all requests, on the device and in host swap space."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from slosched.core import NO_BLOCK, BlockCopy, BlockLedger
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
from slosched.kv.window import WindowedLedger, num_unseen_blocks


class KVCache:
    """A paged KV cache: a request's tokens live in the blocks of its table, in order.

    Invariant, for each of the two pools: free + lent + held = total, and no block is held twice.

    With a `prefix_index`, full blocks are shared by requests that begin alike.  They stay cached
    when no request holds them any more, until their room is needed: they count as free.  Then on
    the device empty + cached + lent + held = total, where a block that several requests hold counts
    once.  Without one, only the members of a group share the blocks of their prompt.  With a
    `prefix_host`, what the device evicts of them stays in further blocks of host
    memory, which are numbered after those for swapping.

    With `window_tokens`, no token sees more than so many last tokens, itself included.  Then
    requests give back the blocks that none of their tokens will see again (`drop_unseen`), except
    for blocks that others may share: with a prefix index none, and in groups no member does.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int = 16,
        num_host_blocks: int = 0,
        prefix_index: PrefixIndex | None = None,
        prefix_host: PrefixHost = NO_PREFIX_HOST,
        window_tokens: int | None = None,
    ) -> None:
        if window_tokens is not None and window_tokens < 1:
            raise ValueError(f"a sliding window has at least one token, not {window_tokens}")
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
        self.window_tokens = window_tokens if prefix_index is None else None
        """The sliding window by which requests give back blocks; None if they keep all."""
        self._dropped: dict[str, int] = {}
        """The number of first blocks that requests have given back, where it is not 0."""
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
        return len(table) - self._dropped.get(request_id, 0) if table else 0

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

        Blocks that it has given back are `core.NO_BLOCK`.  The mapping and its lists are live: read
        them and keep none.
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

    def drop_unseen(self, request_id: str, num_computed_tokens: int) -> None:
        """Give back the first blocks of a request on the device that no later token sees.

        Only with `window_tokens`.  A step that runs may still read them, since what gets them is
        computed in a later step; so the table becomes a new list.
        """
        assert self.window_tokens is not None
        table, num_dropped = self._tables[request_id], self._dropped.get(request_id, 0)
        num = num_unseen_blocks(num_computed_tokens, self.window_tokens, self.block_size)
        num = min(num, len(table) - 1)
        if num <= num_dropped or self.prefixes.may_share(request_id):
            return
        self._device.give_back(reversed(table[num_dropped:num]))
        self._tables[request_id] = [NO_BLOCK] * num + table[num:]
        self._dropped[request_id] = num

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
        host = self._host.take(self.num_held_blocks(request_id))
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
        first = self._tables.get(request_id) or [NO_BLOCK] * self._dropped.get(request_id, 0)
        self._tables[request_id] = [*first, *device]
        self._host.give_back(reversed(host))
        return [BlockCopy(*pair) for pair in zip(device, host[num_found:], strict=True)]

    def ledger(self) -> BlockLedger:
        """Return the account of what a plan in the making does to the free blocks."""
        ledger = self.prefixes.ledger()
        if self.window_tokens is None:
            return ledger
        return WindowedLedger(ledger, self._tables, self._dropped)

    def check(self) -> None:
        """Raise KVCorruptionError unless every block is accounted for."""
        held = {name: table[self._dropped.get(name, 0) :] for name, table in self._tables.items()}
        check_pool("device", self._device, held, self._lent, self.prefixes.index.blocks())
        check_pool("host", self._host, self._host_tables, [], {})
        self.prefixes.check()

    def _free(self, request_id: str, *, at_end: bool) -> None:
        self._leave(request_id, at_end=at_end)
        self._dropped.pop(request_id, None)
        self._host.give_back(reversed(self._host_tables.pop(request_id, ())))

    def _leave(self, request_id: str, *, at_end: bool) -> Sequence[int]:
        """Take the request's table away and return the blocks that it held."""
        table = self._tables.pop(request_id, [])
        table = table[self._dropped.get(request_id, 0) :]
        self._device.give_back(reversed(self.prefixes.leave(request_id, table, at_end=at_end)))
        return table


def _shared_blocks(index: PrefixIndex, block_size: int, host: NoHostTier) -> SharedBlocks:
    if isinstance(index, MergedIndex):
        return MergedBlocks(index, block_size, host)
    if isinstance(index, RankedIndex):
        return RankedBlocks(index, block_size, host)
    return SharedBlocks(index, block_size, host)
