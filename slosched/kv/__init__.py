"""The block tables of the KV cache and its prefix cache, by block numbers and without tensors."""

from slosched.kv.cache import KVCache
from slosched.kv.checks import KVCorruptionError
from slosched.kv.eviction.order import Known
from slosched.kv.eviction.orders import Eviction
from slosched.kv.eviction.ranked_index import RankedIndex
from slosched.kv.pool import BlockPool, OutOfBlocksError
from slosched.kv.prefix.hash_index import HashIndex
from slosched.kv.prefix.host_tier import NO_PREFIX_HOST, HostWrites, PrefixHost
from slosched.kv.prefix.index import PrefixCaching, PrefixIndex
from slosched.kv.prefix.keys import BlockKeys, Key, block_keys
from slosched.kv.prefix.merged_index import MergedIndex
from slosched.kv.prefix.radix_index import RadixIndex

__all__ = [
    "NO_PREFIX_HOST",
    "BlockKeys",
    "BlockPool",
    "Eviction",
    "HashIndex",
    "HostWrites",
    "KVCache",
    "KVCorruptionError",
    "Key",
    "Known",
    "MergedIndex",
    "OutOfBlocksError",
    "PrefixCaching",
    "PrefixHost",
    "PrefixIndex",
    "RadixIndex",
    "RankedIndex",
    "block_keys",
]
