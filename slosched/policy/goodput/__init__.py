"""Our own policy."""
