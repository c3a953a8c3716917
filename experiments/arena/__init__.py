"""The arena: every policy on one engine, with the same requests, each tuned, with intervals."""
