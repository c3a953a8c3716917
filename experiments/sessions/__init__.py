"""Which order of eviction keeps the most programs of agents on time."""
