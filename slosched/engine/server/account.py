"""The account of each HTTP request for text: what was asked, and what became of it.

Handlers fill it in, and reporters, such as the log and the traces, get it once, when the answer is
over and the engine has ended all of its requests.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from starlette.datastructures import Headers
from starlette.requests import Request as HTTPRequest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from slosched.core import NO_SLO, SLO, DeadlineRule, Request
from slosched.engine.server.generations import Generation
from slosched.engine.server.protocol import Options
from slosched.metrics import RequestRecord, is_good, worst

GENERATING_PATHS = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/responses"})
"""The endpoints that generate text."""
_PATIENCE_S = 60.0
"""How long an account waits for the engine after its answer is over, as when a step hangs."""
_KEY = "account"


@dataclass
class Account:
    """One HTTP request for text.  All times of the engine are on its own clock."""

    method: str
    path: str
    headers: Mapping[str, str]
    began_s: float = field(default_factory=time.time)
    """When it came, in seconds since 1970."""
    took_s: float = math.nan
    """How long the answer took, until its last byte was handed over."""
    status: int | None = None
    """The status of the answer; None if there was no answer."""
    error: Mapping[str, object] = field(default_factory=dict)
    """The error that was answered in place of text."""
    model: str | None = None
    options: Options | None = None
    prompts: Sequence[Request] = ()
    """The request for each prompt, or the first of its siblings."""
    generations: Sequence[Generation] = ()
    """All of the engine's requests; of a beam search, whose requests are each for one token, one
    for each answer as its client saw it."""

    def note_asked(self, model: str, options: Options, prompts: Sequence[Request]) -> None:
        """Note a body that was understood."""
        self.model, self.options, self.prompts = model, options, prompts

    def note_submitted(self, firsts: Sequence[Generation]) -> None:
        """Note the first generation of each prompt, whose siblings come with it."""
        self.generations = [each for first in firsts for each in (first, *first.siblings)]

    def note(self, message: Message) -> None:
        """Note a part of the answer: its status, and what an error says."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
        elif message["type"] == "http.response.body" and self.status != 200 and not self.error:
            with suppress(ValueError, KeyError, TypeError):
                self.error = dict(json.loads(message["body"])["error"])

    def record(self, rule: DeadlineRule) -> RequestRecord | None:
        """Return the record of the request that kept its promise least.

        Returns None if there is none, or if one has not ended.
        """
        requests = [generation.request for generation in self.generations]
        if not requests or any(request.end_reason is None for request in requests):
            return None
        return worst([RequestRecord.from_request(request) for request in requests], rule)

    @property
    def num_output_tokens(self) -> int:
        return sum(generation.request.num_output_tokens for generation in self.generations)

    @property
    def is_relegated(self) -> bool:
        return any(generation.request.is_relegated for generation in self.generations)

    @property
    def expected_ttft_s(self) -> float | None:
        """Return the TTFT that was expected on arrival, the longest of several; None if unknown."""
        expected = [each.expected_ttft_s for each in self.generations]
        return max((value for value in expected if value is not None), default=None)

    @property
    def slo(self) -> SLO:
        """Return the SLO that was asked for."""
        if not self.prompts:
            return NO_SLO
        return self.prompts[0].asked_slo or self.prompts[0].slo

    def is_good(self, record: RequestRecord, rule: DeadlineRule) -> bool | None:
        """Return whether the request finished within its SLO; None if it has none."""
        return None if self.slo == NO_SLO else is_good(record, rule)

    async def wait_ended(self) -> None:
        """Wait until the engine has ended all requests, but not for ever."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_PATIENCE_S):
                for generation in self.generations:
                    await generation.ended.wait()


def account_of(http: HTTPRequest) -> Account:
    """Return the account of an HTTP request to one of GENERATING_PATHS."""
    account: Account = http.scope[_KEY]
    return account


Reporter = Callable[[Account], None]


class KeepAccounts:
    """Middleware that gives each request for text an account, and reporters the closed accounts."""

    def __init__(self, app: ASGIApp, reporters: Sequence[Reporter]) -> None:
        self._app = app
        self._reporters = reporters

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] not in GENERATING_PATHS:
            await self._app(scope, receive, send)
            return
        account = Account(scope["method"], scope["path"], Headers(scope=scope))
        began_s = time.perf_counter()

        async def noting(message: Message) -> None:
            account.note(message)
            await send(message)

        try:
            await self._app({**scope, _KEY: account}, receive, noting)
        except Exception:
            account.status = account.status or 500  # so it is answered further out
            raise
        finally:
            account.took_s = time.perf_counter() - began_s
            await self._close(account)

    async def _close(self, account: Account) -> None:
        if not self._reporters:
            return
        try:
            await account.wait_ended()
        finally:  # also when the server is about to end
            for report in self._reporters:
                report(account)
