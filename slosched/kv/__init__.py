"""KV-cache bookkeeping: which block belongs to whom.  No tensors here."""

from slosched.kv.cache import KVCache, KVCorruptionError
from slosched.kv.pool import BlockPool, OutOfBlocksError

__all__ = ["BlockPool", "KVCache", "KVCorruptionError", "OutOfBlocksError"]
