"""The note that step times were derived, not measured, and how wrong that is."""

from __future__ import annotations

import json
from collections.abc import Mapping

from slosched.cli.console import console
from slosched.perfmodel.derivation import DERIVATION_ERROR


def print_derivation(provenance: Mapping[str, str]) -> None:
    """Print how wrong derived step times are; print nothing for measured ones."""
    if DERIVATION_ERROR not in provenance:
        return
    error = json.loads(provenance[DERIVATION_ERROR])
    console.print(
        f"[yellow]note:[/] these times are derived, not measured: GPUs with tables, derived in the "
        f"same way, are off by {error['mape']:.0f} % on average and {error['p99']:.0f} % at p99"
    )
