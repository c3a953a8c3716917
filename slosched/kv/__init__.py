"""KV-cache bookkeeping: which block belongs to whom, and who may share it.  No tensors here."""

from slosched.kv.cache import KVCache, KVCorruptionError
from slosched.kv.keys import BlockKeys, Key, block_keys
from slosched.kv.pool import BlockPool, OutOfBlocksError
from slosched.kv.prefix import HashIndex, PrefixCaching, PrefixIndex

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
    "block_keys",
]
