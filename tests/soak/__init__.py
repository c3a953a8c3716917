"""A server under bad clients of all kinds, and what it promises all the same: `make soak`."""
