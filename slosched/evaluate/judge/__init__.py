"""A verdict on a policy: it plays against the arena's finalists until the answer is clear."""

from slosched.evaluate.judge.bout import Answer, Bout
from slosched.evaluate.judge.judge import LOADS, Judge
from slosched.evaluate.judge.scenarios import Contender, Scenario, scenarios
from slosched.evaluate.judge.sequential import Verdict
from slosched.evaluate.judge.time_limit import TimeLimit

__all__ = [
    "LOADS",
    "Answer",
    "Bout",
    "Contender",
    "Judge",
    "Scenario",
    "TimeLimit",
    "Verdict",
    "scenarios",
]
