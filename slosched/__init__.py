"""slosched: SLO-aware scheduling of LLM inference.  Read `slosched.core` first."""

__version__ = "0.1.0"
