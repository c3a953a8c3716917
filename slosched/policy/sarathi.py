"""Sarathi-Serve: stall-free batches under a fixed token budget."""

from __future__ import annotations

from dataclasses import dataclass

from slosched.policy.kit.decode_first import DecodeFirst


@dataclass
class Sarathi(DecodeFirst):
    """Every decode, then prompts in order of arrival, cut so that a step stays in the budget.

    The budget is the only option that has to be tuned.  The best one is the largest with which a
    step of many decodes and one chunk still meets the TPOT.  Source: Sarathi-Serve (OSDI '24,
    arXiv 2403.02310), algorithm 3, `sarathi_scheduler.py`.
    """
