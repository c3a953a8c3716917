"""Orders in which the prefix cache evicts blocks that no request holds."""
