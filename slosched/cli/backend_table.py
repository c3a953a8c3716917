"""The comparison of the engines whose kernels AIConfigurator measured, as a table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from slosched.cli.console import console
from slosched.perfmodel.aiconfigurator import Deployment
from slosched.perfmodel.aiconfigurator.deployment import BACKENDS
from slosched.perfmodel.aiconfigurator.plausibility import (
    TYPICAL_STEPS,
    TableCheck,
    check_tables,
    compare_backends,
    most_plausible,
)

_FAR_APART = 1.2
"""Times of two plausible backends that differ by more than this factor are worth a note."""


def with_chosen_backend(deployment: Deployment) -> Deployment:
    """Print what the tables of each backend say, and return the deployment with one of them.

    Raises MissingTablesError if no backend has tables.
    """
    checks = compare_backends(deployment)
    console.print(_table(checks))
    chosen = most_plausible(checks)
    plausible = {name: check for name, check in checks.items() if not check.doubts}
    for name, check in checks.items():
        for doubt in check.doubts:
            _note(f"{BACKENDS[name]}: {doubt}")
    why = "the first without a doubt" if plausible else "there are doubts about all"
    console.print(f"taking the tables of {checks[chosen].engine}: {why} (--backend takes another)")
    for place, step in enumerate(TYPICAL_STEPS):
        times_s = [check.step_s[place] for check in plausible.values()]
        if times_s and max(times_s) > _FAR_APART * min(times_s):
            apart = max(times_s) / min(times_s)
            _note(f"the plausible tables are a factor of {apart:.2f} apart for {step}")
    return replace(deployment, backend=chosen)


def warn_of_doubts(deployment: Deployment) -> None:
    """Print what speaks against the tables of the deployment's backend."""
    for doubt in check_tables(deployment).doubts:
        _note(f"{BACKENDS[deployment.backend]}: {doubt}; without --backend all are compared")


def _table(checks: Mapping[str, TableCheck]) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 0, 0, 0), pad_edge=False)
    table.add_column("engine")
    for name in ("decode attention", "matrix products", *TYPICAL_STEPS):
        table.add_column(name, justify="right")
    for check in checks.values():
        table.add_row(
            check.engine,
            _bandwidth(check),
            f"{check.gemm_throughput:.0%} of peak",
            *(f"{1e3 * seconds:.2f} ms" for seconds in check.step_s),
        )
    return table


def _bandwidth(check: TableCheck) -> str:
    if check.decode_bandwidth is None or check.bytes_per_s is None:
        return "?"
    return f"{check.bytes_per_s / 1e12:.2f} TB/s, {check.decode_bandwidth:.0%}"


def _note(text: str) -> None:
    console.print(f"[yellow]note:[/] {escape(text)}")
