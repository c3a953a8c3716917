"""What a request is promised: its own word in the body, else its headers, else the server's."""

from __future__ import annotations

from collections.abc import Mapping

from slosched.core import SLO
from slosched.engine.server.errors import ApiError
from slosched.workload import seconds_of_ms

TTFT_HEADER = "x-slo-ttft-ms"
TPOT_HEADER = "x-slo-tpot-ms"
"""The headers of the Gateway API Inference Extension and llm-d."""


def parse_slo(headers: Mapping[str, str], body: Mapping[str, object], default: SLO) -> SLO:
    """The request's SLO in seconds; each of the two times is looked up on its own.

    Raises ApiError (400) for a value that is not a positive, finite number of milliseconds.
    """
    ttft_s = _find(headers, TTFT_HEADER, body, "slo_ttft_ms", default.ttft_s)
    tpot_s = _find(headers, TPOT_HEADER, body, "slo_tpot_ms", default.tpot_s)
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
