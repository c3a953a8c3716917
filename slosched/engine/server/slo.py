"""What a request is promised: its own word in the body, else its headers, else the server's."""

from __future__ import annotations

from collections.abc import Mapping

from slosched.core import SLO
from slosched.engine.server.errors import ApiError
from slosched.workload import seconds_of_ms

TTFT_HEADER = "x-slo-ttft-ms"
TPOT_HEADER = "x-slo-tpot-ms"
"""The headers of the Gateway API Inference Extension and llm-d."""
_TTFT_FIELD, _TPOT_FIELD = "slo_ttft_ms", "slo_tpot_ms"


def parse_slo(headers: Mapping[str, str], body: Mapping[str, object], default: SLO) -> SLO:
    """The request's SLO in seconds; each of the two times is looked up on its own.

    Raises ApiError (400) for a value that is not a positive, finite number of milliseconds, and for
    a promise of any other name in the body.
    """
    for name in body:
        if name.startswith("slo_") and name not in (_TTFT_FIELD, _TPOT_FIELD):
            raise ApiError(
                400,
                f"there is no promise {name!r:.100}, only {_TTFT_FIELD} and {_TPOT_FIELD}",
                param=name,
            )
    ttft_s = _find(headers, TTFT_HEADER, body, _TTFT_FIELD, default.ttft_s)
    tpot_s = _find(headers, TPOT_HEADER, body, _TPOT_FIELD, default.tpot_s)
    return SLO(ttft_s, tpot_s, default.e2e_s)


def _find(
    headers: Mapping[str, str],
    header: str,
    body: Mapping[str, object],
    field: str,
    default_s: float,
) -> float:
    for name, value in ((field, body.get(field)), (header, headers.get(header))):
        if value is not None:
            try:
                return seconds_of_ms(name, value)
            except ValueError as error:
                raise ApiError(400, str(error), param=name) from None
    return default_s
