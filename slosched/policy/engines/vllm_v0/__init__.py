"""vLLM V0's scheduler."""
