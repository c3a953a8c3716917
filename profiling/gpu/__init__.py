"""Half an hour on a GPU: measure the torch engine, and check what was predicted of it."""
