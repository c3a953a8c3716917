"""What a request is promised: its own word in the body, else its headers, else the server's."""

from __future__ import annotations

import math
from collections.abc import Mapping

from slosched.core import SLO
from slosched.engine.server.errors import ApiError

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
            return _seconds(name, value)
    return default_s


def _seconds(name: str, value: object) -> float:
    try:
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise ValueError
        seconds = float(value) / 1000
        if not 0 < seconds < math.inf:
            raise ValueError
    except (ValueError, OverflowError):
        raise ApiError(
            400,
            f"{name} must be a positive, finite number of milliseconds, not {value!r:.100}",
            param=name,
        ) from None
    return seconds
