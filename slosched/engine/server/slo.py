"""The SLO of a request: each time is taken from its body, else its headers, else the server."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from slosched.core import SLO
from slosched.engine.server.errors import ApiError
from slosched.workload import seconds_of_ms
from slosched.workload.http_slo import (
    BEST_EFFORT_FIELD,
    PromiseNames,
    asked_slo,
    unknown_promise,
)


def parse_slo(headers: Mapping[str, str], body: Mapping[str, object], default: SLO) -> SLO:
    """Return the request's SLO; each of the three times is looked up on its own.

    Raises ApiError (400) for a value that is not a positive, finite number of milliseconds, and for
    a promise of any other name in the body.
    """
    if unknown := unknown_promise(body, BEST_EFFORT_FIELD):
        name, complaint = unknown
        raise ApiError(400, complaint, param=name)
    return asked_slo(partial(_asked_s, headers, body), default)


def _asked_s(
    headers: Mapping[str, str], body: Mapping[str, object], names: PromiseNames
) -> float | None:
    """Return the seconds that the request asks for; None if it leaves them to the server."""
    name: str | None = names.field
    value = body.get(names.field)
    if value is None:
        name = names.header_in(headers)
        value = None if name is None else headers[name]
    if name is None or value is None:
        return None
    try:
        return seconds_of_ms(name, value)
    except ValueError as error:
        raise ApiError(400, str(error), param=name) from None
