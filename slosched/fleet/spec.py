"""Routers and scalers from one line of text: `round_robin`, `power_of_two:num_choices=3`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar, get_type_hints

from slosched.core import SloschedError
from slosched.fleet.router import Router
from slosched.fleet.routers import ROUTERS
from slosched.fleet.scaler import Scaler
from slosched.fleet.scalers import SCALERS
from slosched.policy.spec import PolicySpecError, option_value
from slosched.spelling import meant, no_option

_T = TypeVar("_T")


class RouterSpecError(SloschedError, ValueError):
    """A line of text does not name a router."""


class ScalerSpecError(SloschedError, ValueError):
    """A line of text does not name a scaler."""


def make_router(spec: str) -> Router:
    """Return the router that `spec` names, with its fields set accordingly.

    Raises RouterSpecError if the text is not valid.
    """
    try:
        return _made(spec, "router", ROUTERS)
    except ValueError as error:
        raise RouterSpecError(str(error)) from error


def make_scaler(spec: str) -> Scaler:
    """Return the scaler that `spec` names, with its fields set accordingly.

    Raises ScalerSpecError if the text is not valid.
    """
    try:
        return _made(spec, "scaler", SCALERS)
    except ValueError as error:
        raise ScalerSpecError(str(error)) from error


def _made(spec: str, what: str, table: Mapping[str, type[_T]]) -> _T:
    """Return an object of the class that `spec` names in the table; ValueError for other texts."""
    name, _, text = spec.partition(":")
    found: Any = table.get(name)
    if found is None:
        raise ValueError(f"no {what} {name!r}{meant(name, table)}; there are {', '.join(table)}")
    hints = get_type_hints(found)
    known = [field.name for field in fields(found)]
    options: dict[str, object] = {}
    for part in filter(None, text.split(",")):
        option, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or option not in known:
            raise ValueError(no_option(name, part, known))
        try:
            options[option] = option_value(option, value, hints[option])
        except PolicySpecError as error:
            raise ValueError(f"{name}: {error}") from error
    try:
        made: _T = found(**options)
    except ValueError as error:
        raise ValueError(f"{name!r} makes no {what}: {error}") from error
    return made
