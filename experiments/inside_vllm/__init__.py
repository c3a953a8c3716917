"""Real vLLM servers: vLLM's own scheduler and slosched's policies on the same requests."""
