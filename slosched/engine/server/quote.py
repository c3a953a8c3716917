"""The question and the answer of GET /v1/quote."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from slosched.core import OnInfeasible, Request
from slosched.engine.server.errors import ApiError
from slosched.engine.server.values import Body, query_flag
from slosched.engine.server.worker import EngineWorker, NoQuoteError
from slosched.policy.offer import Occupancy, quotes_document
from slosched.workload.http_quote import PROMPT_FIELD, asked_lengths
from slosched.workload.http_slo import BEST_EFFORT_FIELD


def parse_promise(query: Mapping[str, str]) -> Body:
    """Return what a query asks for, as the body of a generation would say it."""
    return {**query, BEST_EFFORT_FIELD: query_flag(query, BEST_EFFORT_FIELD)}


def parse_prompt_tokens(query: Mapping[str, str], max_model_len: int) -> list[int]:
    """Return the prompt lengths of a query; raise ApiError (400) if they are not valid."""
    try:
        return asked_lengths(query.get(PROMPT_FIELD), max_model_len)
    except ValueError as error:
        raise ApiError(400, str(error), param=PROMPT_FIELD) from error


def quotes_of(
    worker: EngineWorker,
    requests: Sequence[Request],
    model_name: str,
    on_infeasible: OnInfeasible,
) -> dict[str, object]:
    """Return what requests would be promised now; raise ApiError (501) if nobody can say.

    `on_infeasible` says what becomes of them if that cannot be kept.
    """
    try:
        offers = [worker.quote(request) for request in requests]
    except NoQuoteError as error:
        raise ApiError(501, str(error), code="no_quote") from error
    scheduler = worker.scheduler
    occupancy = Occupancy(scheduler.num_running, scheduler.num_waiting, scheduler.kv.used_fraction)
    return quotes_document(offers, model_name, occupancy, on_infeasible)
