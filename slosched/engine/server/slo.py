"""The SLO of a request: each time is taken from its body, else its headers, else the server."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from starlette.datastructures import Headers

from slosched.core import SLO
from slosched.engine.server.errors import ApiError
from slosched.workload import seconds_of_ms
from slosched.workload.http_slo import (
    BEST_EFFORT_FIELD,
    PromiseNames,
    asked_slo,
    repeated_header,
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


def refuse_repeated(headers: Headers) -> None:
    """Raise ApiError (400) if a header with an SLO or a tier comes twice.

    It is not known which is meant, and a proxy or a server may take either.
    """
    if name := repeated_header(headers.keys()):
        raise ApiError(400, f"the header {name} comes more than once; send it once", param=name)


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
