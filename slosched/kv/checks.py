"""The check that every block of a pool is accounted for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from slosched.core import SloschedError
from slosched.kv.pool import BlockPool


class KVCorruptionError(SloschedError):
    """Blocks were lost or are held twice: a bug in the bookkeeping."""


def check_pool(
    name: str,
    pool: BlockPool,
    tables: Mapping[str, list[int]],
    lent: list[int],
    cached: Mapping[int, int],
) -> None:
    """Raise KVCorruptionError unless all blocks are free, cached, held, or `lent` to be held.

    `cached` has, for each block that may be shared, the number of requests that should hold it.
    """
    free = pool.free_blocks
    holders = Counter(block for table in tables.values() for block in table)
    holders.update(lent)
    wrong = {b: n for b, n in holders.items() if cached.get(b, 1) != n} | {
        b: n for b, n in cached.items() if holders.get(b, 0) != n
    }
    distinct = free | holders.keys() | cached.keys()
    num_held = sum(holders.values())
    num_idle = sum(1 for block in cached if block not in holders)
    if (
        wrong
        or len(free) != pool.num_free
        or len(free) + num_idle + len(holders) != pool.num_blocks
        or distinct != frozenset(range(pool.num_blocks))
    ):
        raise KVCorruptionError(
            f"{name} KV blocks do not add up: {pool.num_free} free + {num_held} held"
            f"{f' + {num_idle} cached' if cached else ''}, {len(distinct)} distinct, "
            f"of {pool.num_blocks}{f'; not held as often as thought: {wrong}' if wrong else ''}"
        )
