"""What a door would promise a request that came now, and how servers write it down."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from slosched.core import DeadlineRule, EndReason, LatencyModel, OnInfeasible, Request
from slosched.policy.door import Door
from slosched.policy.kit.crowd import decode_s
from slosched.policy.kit.quotes.expected import Quote
from slosched.policy.kit.quotes.work import prompt_work


class Offer(NamedTuple):
    """What a request would be promised if it came now."""

    request: Request
    quote: Quote
    refusal: EndReason | None
    """Why it would be refused; None if it would be let in."""
    alone_ttft_s: float
    """Its TTFT if the device had nothing else to do."""
    alone_tpot_s: float
    """Its TPOT then."""


class Occupancy(NamedTuple):
    """How busy a server is."""

    num_running: int
    num_waiting: int
    kv_share: float
    """The share of its KV blocks that is in use."""


def offer_of(door: Door, request: Request, model: LatencyModel, rule: DeadlineRule) -> Offer:
    """Return what a request would be promised if it came now; any thread may ask."""
    return Offer(
        request,
        *door.foresee(request, model, rule),
        request.server_s + prompt_work(request, model).alone_s,
        decode_s(request, model),
    )


def quotes_document(
    offers: Sequence[Offer], model_name: str, occupancy: Occupancy, on_infeasible: OnInfeasible
) -> dict[str, object]:
    """Return the answer to GET /v1/quote: a quote, or a list of them if there are several.

    `on_infeasible` says what becomes of requests that cannot be in time and do not say it.
    """
    quotes = [_document(offer, model_name, occupancy) for offer in offers]
    document = quotes[0] if len(quotes) == 1 else {"object": "list", "data": quotes}
    return {**document, "on_infeasible": on_infeasible.value}


def _document(offer: Offer, model_name: str, occupancy: Occupancy) -> dict[str, object]:
    promised = offer.request.slo
    return {
        "object": "quote",
        "model": model_name,
        "prompt_tokens": offer.request.num_prompt_tokens,
        "ttft_ms": _milliseconds_by_quantile(offer.quote.ttft_s),
        "tpot_ms": _milliseconds_by_quantile(offer.quote.tpot_s),
        "alone_ms": {"ttft": 1000 * offer.alone_ttft_s, "tpot": 1000 * offer.alone_tpot_s},
        "promised_ms": {
            "ttft": _milliseconds(promised.ttft_s),
            "tpot": _milliseconds(promised.tpot_s),
        },
        "would_refuse": offer.refusal,
        "num_requests_running": occupancy.num_running,
        "num_requests_waiting": occupancy.num_waiting,
        "kv_cache_usage_perc": occupancy.kv_share,
    }


def _milliseconds_by_quantile(seconds: Mapping[float, float]) -> dict[str, float]:
    """Return times by the names of their quantiles: p50, p90 and so on."""
    return {f"p{100 * level:.0f}": 1000 * value for level, value in seconds.items()}


def _milliseconds(seconds: float) -> float | None:
    """Return milliseconds; None for a time without a limit, which JSON cannot spell."""
    return 1000 * seconds if seconds < math.inf else None
