"""Metadata that the fields of a policy hold for the command line."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import field
from typing import Any

TRIED = "tried"
"""Key of a field's metadata under which `tunable` keeps the values."""

HEEDED = "heeded"
"""Key of a field's metadata under which `heeding` keeps the fields of `Request`."""


def tunable(default: Any, *others: object) -> Any:
    """Return a field of a policy with the values that `slosched tune` tries for it."""
    return field(default=default, metadata={TRIED: (default, *others)})


def heeding(default: Any, heeded: Mapping[Hashable, str]) -> Any:
    """Return a field of a policy that makes it go by a field of `Request`: which one, by value.

    An example is `heeding(Order.FCFS, {Order.PRIORITY: "priority"})`.  Where all requests have the
    same value in that field the option changes nothing, and the command line says so.
    """
    return field(default=default, metadata={HEEDED: heeded})
