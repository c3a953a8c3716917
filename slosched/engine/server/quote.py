"""The question and the answer of GET /v1/quote."""

from __future__ import annotations

import math
from collections.abc import Mapping

from slosched.core import Request
from slosched.engine.server.errors import ApiError
from slosched.engine.server.worker import EngineWorker, NoQuoteError

_FIELD = "prompt_tokens"
_MOST_LENGTHS = 16
"""Prompt lengths that one question may name."""


def parse_prompt_tokens(query: Mapping[str, str], max_model_len: int) -> list[int]:
    """Return the prompt lengths of a query, several of them with commas between.

    Raises ApiError (400) if there is none, one is too long, or there are too many.
    """
    text = query.get(_FIELD)
    if text is None:
        raise ApiError(
            400,
            f"say how long the prompt is: /v1/quote?{_FIELD}=512 (/tokenize counts)",
            param=_FIELD,
        )
    lengths = text.split(",", _MOST_LENGTHS)
    if len(lengths) > _MOST_LENGTHS:
        raise ApiError(400, f"{_FIELD} may name at most {_MOST_LENGTHS} lengths", param=_FIELD)
    return [_length(each, max_model_len - 1) for each in lengths]


def _length(text: str, most: int) -> int:
    if not (text.isascii() and text.isdecimal() and 1 <= int(text[:20]) <= most):
        raise ApiError(
            400, f"{_FIELD} must be an integer from 1 to {most}, not {text!r:.100}", param=_FIELD
        )
    return int(text)


def quote_of(worker: EngineWorker, request: Request, model_name: str) -> dict[str, object]:
    """Return what a request would be promised now; raise ApiError (501) if nobody can say."""
    try:
        offer = worker.quote(request)
    except NoQuoteError as error:
        raise ApiError(501, str(error), code="no_quote") from error
    scheduler = worker.scheduler
    return {
        "object": "quote",
        "model": model_name,
        "prompt_tokens": request.num_prompt_tokens,
        "ttft_ms": _milliseconds_by_quantile(offer.quote.ttft_s),
        "tpot_ms": _milliseconds_by_quantile(offer.quote.tpot_s),
        "alone_ms": {"ttft": 1000 * offer.alone_ttft_s, "tpot": 1000 * offer.alone_tpot_s},
        "promised_ms": {
            "ttft": _milliseconds(request.slo.ttft_s),
            "tpot": _milliseconds(request.slo.tpot_s),
        },
        "would_refuse": offer.refusal,
        "num_requests_running": scheduler.num_running,
        "num_requests_waiting": scheduler.num_waiting,
        "kv_cache_usage_perc": scheduler.kv.used_fraction,
    }


def _milliseconds_by_quantile(seconds: Mapping[float, float]) -> dict[str, float]:
    """Return times by the names of their quantiles: p50, p90 and so on."""
    return {f"p{100 * level:.0f}": 1000 * value for level, value in seconds.items()}


def _milliseconds(seconds: float) -> float | None:
    """Return milliseconds; None for a time without a limit, which JSON cannot spell."""
    return 1000 * seconds if seconds < math.inf else None
