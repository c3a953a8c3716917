"""A policy that chooses among others by replaying recent traffic under each of them."""
