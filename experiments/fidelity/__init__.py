"""The simulator against real engines: what vLLM did on GPUs, and what slosched says it does."""
