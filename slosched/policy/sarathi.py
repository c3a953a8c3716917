"""Sarathi-Serve: stall-free batches under a fixed token budget."""

from __future__ import annotations

from dataclasses import dataclass

from slosched.policy.kit.decode_first import DecodeFirst


@dataclass
class Sarathi(DecodeFirst):
    """Every decode, then prompts in order of arrival, cut so that a step stays in the budget.

    The budget is the one knob, and it has to be tuned: the largest with which a step full of
    decodes and one chunk still meets the TPOT promise.  Source: Sarathi-Serve (OSDI '24,
    arXiv 2403.02310), algorithm 3, `sarathi_scheduler.py`.
    """
