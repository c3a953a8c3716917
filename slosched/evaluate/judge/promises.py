"""The promises of the arena: rules for the SLOs of a scenario's requests, by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from slosched.core import SLO
from slosched.perfmodel import FittedModel
from slosched.workload import Proportional, SLORule

PREFILL_FACTOR = 2.0
"""TTFT grows by this multiple of the time that the prompt's prefill takes alone."""


@dataclass(frozen=True)
class Mixture:
    """A rule that gives each request one of several rules at random, all equally likely."""

    rules: Sequence[SLORule]
    seed: int

    def assign(self, num_prompt_tokens: Sequence[int]) -> list[SLO]:
        drawn = np.random.default_rng(self.seed).integers(
            len(self.rules), size=len(num_prompt_tokens)
        )
        by_rule = [rule.assign(num_prompt_tokens) for rule in self.rules]
        return [by_rule[k][i] for i, k in enumerate(drawn)]


Promise = Callable[[FittedModel, int], SLORule]
"""A function of a device and a window's seed that returns the rule for the SLOs."""


def _promise(base_s: float, tpot_s: float, factor: float = PREFILL_FACTOR) -> Promise:
    return lambda model, _seed: Proportional(model.predict_prefill, factor, tpot_s, base_s)


def _mixed(model: FittedModel, seed: int) -> SLORule:
    return Mixture([PROMISES[name](model, seed) for name in ("tight", "medium", "relaxed")], seed)


PROMISES: dict[str, Promise] = {
    "tight": _promise(0.5, 0.025),
    "medium": _promise(1.0, 0.050),
    "relaxed": _promise(5.0, 0.100),
    "mixed": _mixed,
    "proportional": _promise(0.25, 0.050, factor=5.0),
}
PROMISED = {
    "tight": "0.5 s + 2 × prefill, 25 ms a token",
    "medium": "1 s + 2 × prefill, 50 ms a token",
    "relaxed": "5 s + 2 × prefill, 100 ms a token",
    "mixed": "tight, medium or relaxed, a third each, at random",
    "proportional": "0.25 s + 5 × prefill, 50 ms a token",
}
