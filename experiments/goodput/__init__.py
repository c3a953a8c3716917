"""goodput, with one of its parts replaced: what was tried on the way, and what it gave."""
