"""Block tables of all requests, on the device and in host swap space."""

from __future__ import annotations

from collections.abc import Mapping

from slosched.core import BlockCopy, SloschedError
from slosched.kv.pool import BlockPool


class KVCorruptionError(SloschedError):
    """Blocks were lost or are held twice: a bug in the bookkeeping."""


class KVCache:
    """Paged KV cache: a request's tokens live in the blocks of its table, in order.

    Invariant, for each of the two pools: free + lent + held = total, and no block is held twice.
    """

    def __init__(self, num_blocks: int, block_size: int = 16, num_host_blocks: int = 0) -> None:
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

    @property
    def num_blocks(self) -> int:
        return self._device.num_blocks

    @property
    def num_host_blocks(self) -> int:
        return self._host.num_blocks

    @property
    def num_free_blocks(self) -> int:
        return self._device.num_free

    @property
    def num_free_host_blocks(self) -> int:
        return self._host.num_free

    @property
    def used_fraction(self) -> float:
        return 1 - self._device.num_free / self._device.num_blocks

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
            table.extend(self._device.take(missing))
        return table

    def lend(self, count: int) -> None:
        """Take blocks from the free ones for whoever will `grow_lent` by them later."""
        self._lent += self._device.take(count)

    def grow_lent(self, request_id: str, num_tokens: int) -> None:
        """`grow` a request that has a table by blocks that were lent before."""
        table = self._tables[request_id]
        missing = -(-num_tokens // self.block_size) - len(table)
        if missing > 0:
            table += self._lent[-missing:]
            del self._lent[-missing:]

    def free(self, request_id: str) -> None:
        """Give back all that the request holds, on the device and on the host."""
        self._device.give_back(reversed(self._tables.pop(request_id, ())))
        self._host.give_back(reversed(self._host_tables.pop(request_id, ())))

    def swap_out(self, request_id: str) -> list[BlockCopy]:
        """Move the request's table to the host; the copies that make it true."""
        held = len(self._tables[request_id])
        host = self._host.take(held)
        device = self._tables.pop(request_id)
        self._host_tables[request_id] = host
        self._device.give_back(reversed(device))
        return [BlockCopy(*pair) for pair in zip(device, host, strict=True)]

    def swap_in(self, request_id: str) -> list[BlockCopy]:
        """Move the request's table back to the device; the copies that make it true."""
        device = self._device.take(len(self._host_tables[request_id]))
        host = self._host_tables.pop(request_id)
        self._tables[request_id] = device
        self._host.give_back(reversed(host))
        return [BlockCopy(*pair) for pair in zip(device, host, strict=True)]

    def check(self) -> None:
        """Raise KVCorruptionError unless every block is accounted for exactly once."""
        for name, pool, tables, lent in (
            ("device", self._device, self._tables, self._lent),
            ("host", self._host, self._host_tables, []),
        ):
            held = [*lent, *(block for table in tables.values() for block in table)]
            free = pool.free_blocks
            distinct = free.union(held)
            if (
                len(free) != pool.num_free
                or len(held) + len(free) != pool.num_blocks
                or distinct != frozenset(range(pool.num_blocks))
            ):
                raise KVCorruptionError(
                    f"{name} KV blocks do not add up: {pool.num_free} free + {len(held)} held, "
                    f"{len(distinct)} distinct, of {pool.num_blocks}"
                )
