"""KV-cache bookkeeping: which block belongs to whom, and who may share it.  No tensors here."""

from slosched.kv.cache import KVCache, KVCorruptionError
from slosched.kv.keys import BlockKeys, Key, block_keys
from slosched.kv.pool import BlockPool, OutOfBlocksError
from slosched.kv.prefix import HashIndex, PrefixCaching, PrefixIndex
from slosched.kv.radix_index import RadixIndex

__all__ = [
    "BlockKeys",
    "BlockPool",
    "HashIndex",
    "KVCache",
    "KVCorruptionError",
    "Key",
    "OutOfBlocksError",
    "PrefixCaching",
    "PrefixIndex",
    "RadixIndex",
    "block_keys",
]
