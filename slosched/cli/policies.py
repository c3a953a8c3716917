"""`slosched policies`: what there is to choose from."""

from __future__ import annotations

import inspect

from slosched.cli.console import console, table
from slosched.policy import POLICIES
from slosched.policy.spec import policy_fields


def policies() -> None:
    """List the scheduling policies, their options and defaults.

    An option is set after a colon: `--policy slo_aware:margin=0.1,cascade=3`.  A policy of your
    own is `--policy package.module:Class`.
    """
    rows = []
    for name, policy_class in POLICIES.items():
        summary = (inspect.getdoc(policy_class) or "").split("\n\n")[0].replace("\n", " ")
        options = "\n".join(
            f"{option}={default}" + (f"  ({' | '.join(choices)})" if choices else "")
            for option, default, choices in policy_fields(policy_class)
        )
        rows.append((name, summary, options))
    made = table("Policies", ("policy", "what it does", "options and defaults"), rows)
    made.show_lines = True
    for column in made.columns:
        column.justify = "left"
    made.columns[2].no_wrap = True
    console.print(made)
