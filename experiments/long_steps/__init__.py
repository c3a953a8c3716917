"""What `goodput` gains by steps longer than a TPOT, where a chunk's first tokens are dear."""
