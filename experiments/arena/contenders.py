"""The contenders and the values that are tried of each: every policy of the table but one.

A policy that joins `slosched.policy.POLICIES` joins the arena, with the values that its own
`tunable` fields declare.  A combination of several policies needs a line in `WRAPPED`.
`portfolio` plans as one of the others does; experiments/portfolio compares it with them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from slosched.evaluate.tuning import values_of
from slosched.policy import POLICIES
from slosched.policy.spec import values_to_try

BUDGETS = ("512", "256", "768", "1024", "1536", "2048")
OURS = ("goodput", "slo_aware")
APART = "portfolio"
"""The policy that takes part only if it is named."""
BASELINES = dict.fromkeys(("sarathi", "edf", "sjf"), "token_budget")
BASELINES["fcfs"] = "max_num_batched_tokens"
"""The baselines, with the name of each one's token budget; for `fcfs` it is the replica's limit."""
WRAPPED = ("sarathi+early_rejection", "sarathi+past_future")
"""Specs beyond the names in the table."""
_FIRST = ("drop", "deadlines", "token_budget")
"""The parameters with the most effect, which are tried before the trials run out."""


class Class(StrEnum):
    """A group of contenders that are compared with each other."""

    PLAIN = "plain"
    """fcfs, sarathi, edf and sjf, which never give up a request."""
    DROPPING = "with dropping"
    """The same four, which reject requests that are late or cannot be in time."""
    PUBLISHED = "published"
    OURS = "ours"


@dataclass(frozen=True)
class Entry:
    """A policy that is to be tuned, and its class."""

    name: str
    group: Class
    policy: str
    """The policy's spec before it is tuned, as `make_policy` reads it."""
    values: Mapping[str, Sequence[str]]
    """The values that are tried of each parameter, the most effective parameter first."""


def entries() -> list[Entry]:
    """Return the entries of all classes, ours last."""
    return [entry for entry in _every() if entry.name != APART]


def _every() -> list[Entry]:
    found = [entry for name in (*POLICIES, *WRAPPED) for entry in _of(name)]
    return sorted(found, key=lambda entry: list(Class).index(entry.group))


def chosen(names: Sequence[str] | None) -> list[Entry]:
    """Return the entries with these names, of entries or of policies; `entries` if none is named.

    Raises ValueError for a name that is neither.
    """
    if not names:
        return entries()
    every = _every()
    known = {e.name for e in every} | {e.policy.partition(":")[0] for e in every}
    if unknown := [name for name in names if name not in known]:
        raise ValueError(
            f"nobody is called {', '.join(unknown)}; there are {', '.join(e.name for e in every)}"
        )
    return [e for e in every if e.name in names or e.policy.partition(":")[0] in names]


def _of(policy: str) -> Iterator[Entry]:
    if policy in BASELINES:
        budget: dict[str, Sequence[str]] = {BASELINES[policy]: BUDGETS}
        yield Entry(policy, Class.PLAIN, policy, budget)
        yield Entry(
            f"{policy}+drop",
            Class.DROPPING,
            f"{policy}:drop=infeasible",
            {**budget, "drop": ("infeasible", "expired")},
        )
    else:
        group = Class.OURS if policy in OURS else Class.PUBLISHED
        yield Entry(policy, group, policy, _declared(policy))


def _declared(policy: str) -> Mapping[str, Sequence[str]]:
    if not values_to_try(policy):
        return {}
    values = values_of(policy, {})
    first = [name for name in _FIRST if name in values]
    return {name: values[name] for name in dict.fromkeys([*first, *values])}
