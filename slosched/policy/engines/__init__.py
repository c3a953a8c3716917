"""The schedulers of other engines, each in a folder of its own."""
