"""vLLM V1's scheduler."""
