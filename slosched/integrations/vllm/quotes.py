"""Quotes of vLLM with our scheduler: GET /v1/quote, answered by the engine core.

The scheduler is in the process of vLLM's engine core, and the middleware in that of its API server.
vLLM has a channel between the two for calls of the engine core's methods ("utility" calls).  They
are answered in the scheduler's own thread between two steps, so that no quote is of a half-made
plan.  `SLOScheduler` adds a method of its own to the engine core, and the middleware calls it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any, NamedTuple
from urllib.parse import parse_qs

from slosched.core import DeadlineRule, LatencyModel, Policy, Request
from slosched.integrations.vllm.slo import BadPromiseError, Promises
from slosched.policy.door import Door
from slosched.policy.offer import Occupancy, offer_of, quotes_document
from slosched.workload.http_quote import PROMPT_FIELD, asked_lengths

_METHOD = "slosched_quotes"
"""The name under which the engine core is asked."""


class Teller(NamedTuple):
    """What quotes are made of, in the process of the engine core."""

    model: LatencyModel | None
    model_name: str
    promises: Promises
    per_request_s: float
    deadline_rule: DeadlineRule

    def quotes(
        self,
        door: Policy | None,
        lengths_tokens: Sequence[int],
        asked: Mapping[str, object],
        occupancy: Occupancy,
    ) -> dict[str, object]:
        """Return the quotes of prompts of these lengths, with the promise of `asked`.

        That has the fields of a request's `vllm_xargs`.  Returns an `error` with its `code` if
        the policy is no door, or the promise cannot be read.
        """
        model = self.model
        if not isinstance(door, Door) or model is None:
            why = "no quotes without a latency model and a policy that ends in +door"
            return _error(HTTPStatus.NOT_IMPLEMENTED, why)
        try:
            promised, on_infeasible = self.promises.of(asked), self.promises.when_infeasible(asked)
        except BadPromiseError as error:
            return _error(HTTPStatus.BAD_REQUEST, str(error))
        now_s = time.time() - self.per_request_s
        requests = [
            Request("quote", now_s, n, 2, promised, server_s=self.per_request_s)
            for n in lengths_tokens
        ]
        offers = [offer_of(door, request, model, self.deadline_rule) for request in requests]
        return quotes_document(offers, self.model_name, occupancy, on_infeasible)


def answer_calls() -> None:
    """Let the engine core of this process answer the middleware's calls."""
    from vllm.v1.engine.core import EngineCore

    def answer(core: Any, lengths_tokens: list[int], asked: dict[str, object]) -> str:
        return json.dumps(core.scheduler.quotes(lengths_tokens, asked))

    setattr(EngineCore, _METHOD, answer)


async def answer_of(state: Any, query: bytes) -> tuple[HTTPStatus, dict[str, object]]:
    """Return status and document for a question, from the engine core behind an app of `state`."""
    asked = {name: values[0] for name, values in parse_qs(query.decode("latin-1")).items()}
    named = asked.pop(PROMPT_FIELD, None)
    try:
        lengths = asked_lengths(named, state.vllm_config.model_config.max_model_len)
    except ValueError as error:
        return HTTPStatus.BAD_REQUEST, _error(HTTPStatus.BAD_REQUEST, str(error))
    core = state.engine_client.engine_core
    if state.vllm_config.scheduler_config.scheduler_cls is None:
        return _nobody_knows("vLLM's own scheduler gives no quotes: serve with SLOScheduler")
    if len(core.core_engines) > 1:
        return _nobody_knows("with data parallelism the engine of the next request is not known")
    document = json.loads(await core.call_utility_async(_METHOD, lengths, asked))
    if "error" in document:
        return HTTPStatus(document["error"]["code"]), document
    return HTTPStatus.OK, document


def _nobody_knows(why: str) -> tuple[HTTPStatus, dict[str, object]]:
    return HTTPStatus.NOT_IMPLEMENTED, _error(HTTPStatus.NOT_IMPLEMENTED, why)


def _error(status: HTTPStatus, message: str) -> dict[str, object]:
    return {"error": {"message": message, "type": "no_quote", "code": status}}
