"""The prefix cache: KV blocks of equal content, found, shared, kept and evicted."""
