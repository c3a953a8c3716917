"""The orders of eviction by name."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

from slosched.kv.eviction.belady import Belady
from slosched.kv.eviction.order import EvictionOrder, Known
from slosched.kv.eviction.ranked_index import RankedIndex
from slosched.kv.eviction.saga import Saga
from slosched.kv.eviction.saved_time import SavedTime
from slosched.kv.eviction.tail_lru import TailLRU
from slosched.kv.eviction.ttl import TimeToLive
from slosched.kv.prefix.hash_index import HashIndex


class Eviction(StrEnum):
    """The order in which the prefix cache evicts."""

    LRU = "lru"
    TTL = "ttl"
    TAIL_LRU = "tail_lru"
    SAGA = "saga"
    SAVED_TIME = "saved_time"
    BELADY = "belady"

    def new_index(self, known: Known) -> HashIndex:
        """Return an empty index that evicts in this order; raise ValueError if it lacks knowledge.

        `lru` is the order of `HashIndex` itself, and needs none.
        """
        order = _ORDERS.get(self)
        return HashIndex() if order is None else RankedIndex(order(known))


_ORDERS: dict[Eviction, Callable[[Known], EvictionOrder]] = {
    Eviction.TTL: TimeToLive,
    Eviction.TAIL_LRU: TailLRU,
    Eviction.SAGA: Saga,
    Eviction.SAVED_TIME: SavedTime,
    Eviction.BELADY: Belady,
}
