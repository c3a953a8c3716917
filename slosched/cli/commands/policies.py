"""`slosched policies`: list all policies with their options."""

from __future__ import annotations

import inspect
from collections.abc import Mapping

from slosched.cli.console import console, table
from slosched.core import Policy
from slosched.policy import POLICIES, WRAPPERS
from slosched.policy.spec import policy_fields


def policies() -> None:
    """List the scheduling policies, their options and defaults.

    - Options follow the name after a colon: `--policy slo_aware:margin=0.1,cascade=3`
    - A policy of your own is named by its module and class: `--policy package.module:Class`
    - A wrapper around any policy follows after a plus: `--policy
      edf:drop=expired+early_rejection:max_load=0.9`
    """
    _show("Policies", POLICIES)
    _show("Around any policy, after a plus: edf+early_rejection", WRAPPERS)


def _show(title: str, classes: Mapping[str, type[Policy]]) -> None:
    rows = []
    for name, policy_class in classes.items():
        summary = (inspect.getdoc(policy_class) or "").split("\n\n")[0].replace("\n", " ")
        options = "\n".join(
            f"{option}={default}" + (f"  ({' | '.join(choices)})" if choices else "")
            for option, default, choices in policy_fields(policy_class)
        )
        rows.append((name, summary, options))
    made = table(title, ("policy", "what it does", "options and defaults"), rows)
    made.show_lines = True
    for column in made.columns:
        column.justify = "left"
    made.columns[0].no_wrap = True
    made.columns[2].overflow = "fold"
    console.print(made)
