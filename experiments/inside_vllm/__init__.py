"""Real vLLM, with its own scheduler and with slosched's, on the same bursts."""
