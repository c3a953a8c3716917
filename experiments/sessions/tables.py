"""The page of results: programs on time under each order of eviction, and what it computed."""

from __future__ import annotations

import numpy as np
import pandas as pd

from experiments.markdown import table
from experiments.paired import FloatArray, against

_INTRODUCTION = """# Orders of eviction for sessions of agents

Made by `python -m experiments.sessions report` from results.csv.  What is replayed is in cells.py.
Differences are in points of programs on time, paired by program, with 95 % intervals (Student's t
over the programs).  Programs of one replay are late together, so the true intervals are wider.
The orders were designed on another seed.  Turns in time are those that kept their TTFT and TPOT.
Computed are prompt tokens that were not found in the prefix cache.
"""
_LATE = {"reject": "rejects late turns", "relegate": "serves late turns behind all others"}
_HEADS = (
    "eviction",
    "programs on time",
    "against `lru`",
    "against `ttl`",
    "÷ `lru`",
    "÷ `ttl`",
    "÷ `belady`",
    "turns in time",
    "prompt cached",
    "computed, million tokens",
)


def page(results: pd.DataFrame) -> str:
    """Return the page: a table for each policy, fate of late turns, KV cache and rate."""
    parts = [_INTRODUCTION]
    for (policy, late, kv_tokens, rate), found in results.groupby(
        ["policy", "late", "kv_tokens", "rate"], sort=False
    ):
        which = f"`{policy}`" if policy == "fcfs" else f"`{policy}` that {_LATE[str(late)]}"
        head = f"## {which}, {kv_tokens:,} tokens of KV cache, {rate:g} requests/s"
        parts.append(f"{head}\n\n{_one(found)}\n")
    return "\n".join(parts)


def _one(found: pd.DataFrame) -> str:
    """Return the table of one cell, a row for each order."""
    names = list(dict.fromkeys(found["eviction"]))
    rows_of = {name: found[found["eviction"] == name] for name in names}
    outcomes = {name: _outcomes(rows_of[name]) for name in names}
    rows = []
    for name in names:
        own = outcomes[name]
        totals = rows_of[name][["prompt_tokens", "computed_tokens"]].sum()
        rows.append(
            (
                f"`{name}`",
                f"{100 * own.mean():.1f} % ({int(own.sum())} of {len(own)})",
                *("" if name == base else _points(own, outcomes[base]) for base in ("lru", "ttl")),
                *(f"{own.sum() / outcomes[base].sum():.2f}" for base in ("lru", "ttl", "belady")),
                f"{100 * rows_of[name]['turns_in_time'].mean():.1f} %",
                f"{100 * (1 - totals['computed_tokens'] / totals['prompt_tokens']):.1f} %",
                f"{totals['computed_tokens'] / 1e6:.1f}",
            )
        )
    return table(_HEADS, rows, 1)


def _outcomes(found: pd.DataFrame) -> FloatArray:
    """Return 1 for each program on time and 0 for the others, in the order of seeds."""
    texts = found.sort_values("seed")["on_time"]
    return np.array([float(outcome) for text in texts for outcome in text])


def _points(one: FloatArray, other: FloatArray) -> str:
    same = not (one - other).any()
    return "0" if same else against(100 * (one - other))
