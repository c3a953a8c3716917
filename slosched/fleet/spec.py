"""A router from one line of text: `round_robin`, `power_of_two:num_choices=3`."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, get_type_hints

from slosched.core import SloschedError
from slosched.fleet.router import Router
from slosched.fleet.routers import ROUTERS
from slosched.policy.spec import PolicySpecError, option_value
from slosched.spelling import meant


class RouterSpecError(SloschedError, ValueError):
    """A line of text does not name a router."""


def make_router(spec: str) -> Router:
    """Return the router that `spec` names, with its fields set accordingly.

    Raises RouterSpecError if the text is not valid.
    """
    name, _, text = spec.partition(":")
    router_class: Any = ROUTERS.get(name)
    if router_class is None:
        raise RouterSpecError(
            f"no router {name!r}{meant(name, ROUTERS)}; there are {', '.join(ROUTERS)}"
        )
    hints = get_type_hints(router_class)
    known = [field.name for field in fields(router_class)]
    options: dict[str, object] = {}
    for part in filter(None, text.split(",")):
        option, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or option not in known:
            raise RouterSpecError(
                f"{name} has no option {part!r}{meant(option, known)}; write name=value with one "
                f"of {', '.join(known) or 'none'}"
            )
        try:
            options[option] = option_value(option, value, hints[option])
        except PolicySpecError as error:
            raise RouterSpecError(f"{name}: {error}") from error
    try:
        router: Router = router_class(**options)
    except ValueError as error:
        raise RouterSpecError(f"{name!r} makes no router: {error}") from error
    return router
