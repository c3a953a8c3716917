"""The questions that a gateway asks a replica, and how it reads the answers."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import urlencode

import aiohttp

from slosched.core import SloschedError
from slosched.engine.server.json_text import parse_json
from slosched.gateway.answers import MOST_STATE_BYTES, REDIRECTS, read_whole
from slosched.gateway.config import GatewayConfig
from slosched.gateway.forecast import Forecast, grid_tokens
from slosched.metrics.page import Snapshot, parse_metrics
from slosched.replay.keys import KEY_STATUSES, key_headers, why_no_key
from slosched.workload.http_quote import PROMPT_FIELD, QUOTE_PATH

_SAMPLE_TEXT = "The quick brown fox jumps over the lazy dog, and then it asks how long that took. "
_USUAL_BYTES_PER_TOKEN = 4.0
_QUEUES = (
    ("vllm:num_requests_running", "vllm:num_requests_waiting"),
    ("sglang:num_running_reqs", "sglang:num_queue_reqs"),
)
"""The names under which engines show how many requests run and wait."""
_UNREADABLE = (ValueError, LookupError, TypeError, ArithmeticError)
"""What is raised where an answer is not as it should be; the last for numbers without end."""


class ReplicaDownError(SloschedError):
    """A replica does not answer, or says that it does not serve."""


class NoQuotesError(SloschedError):
    """A replica answers, but gives no quotes."""


class Introduction(NamedTuple):
    """What a server says about itself."""

    models: Sequence[Mapping[str, object]]
    bytes_per_token: float
    kv_tokens: int | None
    caches_prefixes: bool


class Questions:
    """Asks one server.  Every method raises ReplicaDownError if it does not answer in time.

    No redirect is followed: a page that is elsewhere is one that the server does not have.
    """

    def __init__(self, session: aiohttp.ClientSession, url: str, config: GatewayConfig) -> None:
        self._session = session
        self._url = url
        self._timeout_s = config.poll_timeout_s
        self._api_key = config.api_key
        self._headers = {"accept-encoding": "identity", **key_headers(config.api_key)}

    async def check_health(self) -> None:
        """Raise ReplicaDownError if /health says so; a server without that page is well."""
        status, text = await self._ask("GET", "/health")
        if status >= 500 or status in REDIRECTS:
            raise ReplicaDownError(f"/health answers {status}: {text:.200}")

    async def introduce(self) -> Introduction:
        """Return its models, and what it tells about its tokenizer and its KV cache."""
        models = await self.models()
        bytes_per_token = await self._bytes_per_token(str(models[0]["id"]))
        return Introduction(models, bytes_per_token, *await self._kv_cache())

    async def models(self) -> Sequence[Mapping[str, object]]:
        """Return the entries of its /v1/models, at least one and each with an id."""
        status, text = await self._ask("GET", "/v1/models")
        if status in KEY_STATUSES:
            raise ReplicaDownError(why_no_key(status, self._api_key))
        if status != 200:
            raise ReplicaDownError(f"/v1/models answers {status}: {text:.200}")
        try:
            document: Any = parse_json(text)
            models = [dict(entry) for entry in document["data"]]
            if not all("id" in model for model in models) or not models:
                raise LookupError
        except _UNREADABLE as error:
            raise ReplicaDownError("/v1/models is not an OpenAI-compatible answer") from error
        return models

    async def forecast(self, max_model_len: int, **promise: object) -> Forecast:
        """Return its quotes for prompts of several lengths; raise NoQuotesError without them.

        `promise` names a promise as the body of a request does; without one, the quotes are for the
        SLO that the server promises by default.
        """
        lengths = ",".join(map(str, grid_tokens(max_model_len)))
        query = urlencode({PROMPT_FIELD: lengths, **promise}, safe=",")
        status, text = await self._ask("GET", f"{QUOTE_PATH}?{query}")
        if status == 503:
            raise ReplicaDownError(f"{QUOTE_PATH} answers 503: {text:.200}")
        if status in KEY_STATUSES:
            raise NoQuotesError(why_no_key(status, self._api_key))
        if status != 200:
            raise NoQuotesError(f"{QUOTE_PATH} answers {status}: {text:.200}")
        try:
            document: Any = parse_json(text)
            return Forecast.of(document)
        except _UNREADABLE as error:
            raise NoQuotesError(f"{QUOTE_PATH} answers what is no quote: {text:.200}") from error

    async def load(self) -> int | None:
        """Return the requests that run and wait, as /load has them; None if it does not say.

        vLLM has this page, too, but counts there only if it was told to.
        """
        _, text = await self._ask("GET", "/load")
        try:
            found: Any = parse_json(text)
            return int(found["num_requests_running"]) + int(found["num_requests_waiting"])
        except _UNREADABLE:
            return None

    async def queue(self) -> int | None:
        """Return the requests that run and wait, as /metrics has them; None if it does not say."""
        page = await self._page()
        for names in _QUEUES:
            count = sum(math.nan if (n := page.total(name)) is None else n for name in names)
            if math.isfinite(count):
                return int(count)
        return None

    async def _bytes_per_token(self, model: str) -> float:
        """Return how many bytes of plain English a token has, as /tokenize tells."""
        text = 8 * _SAMPLE_TEXT
        _, answer = await self._ask("POST", "/tokenize", {"model": model, "prompt": text})
        try:
            document: Any = parse_json(answer)
            return len(text) / int(document["count"])
        except _UNREADABLE:
            return _USUAL_BYTES_PER_TOKEN

    async def _kv_cache(self) -> tuple[int | None, bool]:
        """Return its tokens, None if unknown, and whether prefixes are cached, true if unknown."""
        found = (await self._page()).samples.get("vllm:cache_config_info", ())
        try:
            sizes = [int(s.labels["block_size"]) * int(s.labels["num_gpu_blocks"]) for s in found]
        except (LookupError, ValueError):
            sizes = []
        caching = [sample.labels.get("enable_prefix_caching") != "False" for sample in found]
        return sum(sizes) or None, all(caching)

    async def _page(self) -> Snapshot:
        """Return the page of metrics; an empty one if the server has none that can be read."""
        status, text = await self._ask("GET", "/metrics")
        try:
            return parse_metrics(text if status == 200 else "", 0.0)
        except ValueError:
            return Snapshot(0.0)

    async def _ask(self, method: str, path: str, body: object = None) -> tuple[int, str]:
        try:
            async with (
                asyncio.timeout(self._timeout_s),
                self._session.request(
                    method,
                    self._url + path,
                    json=body,
                    headers=self._headers,
                    allow_redirects=False,
                ) as response,
            ):
                content = await read_whole(response, MOST_STATE_BYTES)
                return response.status, content.decode(errors="replace")
        except TimeoutError:
            raise ReplicaDownError(f"it did not answer within {self._timeout_s:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise ReplicaDownError(describe(error)) from error


def describe(error: BaseException) -> str:
    """Return what went wrong with a connection, in one line."""
    return str(error) or type(error).__name__
