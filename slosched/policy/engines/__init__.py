"""The schedulers of other engines, one folder an engine."""
