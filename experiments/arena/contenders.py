"""Who takes part, and which values are tried of each: every policy of the table, by itself.

A policy that joins `slosched.policy.POLICIES` joins the arena, with the values that its own
`tunable` fields declare.  One that is a combination of others takes a line in `WRAPPED`.
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
BASELINES = dict.fromkeys(("sarathi", "edf", "sjf"), "token_budget")
BASELINES["fcfs"] = "max_num_batched_tokens"
"""And what each calls its token budget: that of `fcfs` is the replica's own limit."""
WRAPPED = ("sarathi+early_rejection", "sarathi+past_future")
"""Specs beyond the names in the table."""
_FIRST = ("drop", "deadlines", "token_budget")
"""What tells most, so that it is tried before the trials run out."""


class Class(StrEnum):
    """Whom one is compared with."""

    PLAIN = "plain"
    """fcfs, sarathi, edf and sjf: nothing is ever given up."""
    DROPPING = "with dropping"
    """The same, and what is late or cannot be in time is rejected."""
    PUBLISHED = "published"
    OURS = "ours"


@dataclass(frozen=True)
class Entry:
    """A policy that is to be tuned, and its class."""

    name: str
    group: Class
    policy: str
    """As `make_policy` reads it, before it is tuned."""
    values: Mapping[str, Sequence[str]]
    """What is tried of each parameter, the most telling parameter first."""


def entries() -> list[Entry]:
    """Of all classes; ours last."""
    found = [entry for name in (*POLICIES, *WRAPPED) for entry in _of(name)]
    return sorted(found, key=lambda entry: list(Class).index(entry.group))


def chosen(names: Sequence[str] | None) -> list[Entry]:
    """Those named, by entry or by policy.  Raises ValueError for a name that is neither."""
    every = entries()
    if not names:
        return every
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
