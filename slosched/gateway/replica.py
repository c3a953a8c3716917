"""A real server as its router sees it: what it told last, and what was sent to it since."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from slosched.core import Request
from slosched.gateway.asked_promises import Tier
from slosched.gateway.forecast import Forecast

UNKNOWN_KV_TOKENS = 131_072
"""The size that the KV cache of a server is taken to have which does not tell."""
_UNASKED = "only routers that need forecasts ask for times"


@dataclass(slots=True, eq=False)
class Sent:
    """A request that was sent to a replica and has not ended."""

    num_prompt_tokens: int
    prefill_s: float
    """Its prefill alone on the device; 0 if the replica gives no forecasts."""
    has_begun: bool = False
    """Whether the first byte of its answer has come."""


class LiveReplica:
    """A server, its state when it was last asked, and the requests that this router sent to it.

    Counts of what this router sent are exact.  What others sent is known from the last poll.
    Expected times are those of the last quotes: of those for requests with the same TTFT, or, if
    there are none, with the TTFT that is most like it.  The wait in them is taken to have shrunk by
    their age, and to have grown by the prefills that were sent since and have not answered.  A
    replica without requests is expected to be as fast as its device, however slow it was before:
    else one that was slow once would be sent nothing more, and could never show that it is well
    again.
    """

    def __init__(self, index: int, url: str, now_s: Callable[[], float] = time.monotonic) -> None:
        self._index = index
        self.url = url
        self.is_up = False
        self.why_down = "it has not been asked yet"
        self.models: Mapping[str, Mapping[str, object]] = {}
        """The entries of /v1/models, by id."""
        self.max_model_len: int | None = None
        self.bytes_per_token = 4.0
        self.wake = asyncio.Event()
        """Set when the replica is to be asked at once."""
        self._kv_tokens, self._caches_prefixes = UNKNOWN_KV_TOKENS, True
        self._now_s = now_s
        self._forecasts: Mapping[float, Forecast] = {}
        """By the TTFT that they are for; the first is of the SLO that is promised by default."""
        self.tiers: dict[Tier, Forecast | None] = {}
        """What it promises to tiers, as far as it was asked; None if it has no such tier."""
        self._asked_s = -math.inf
        self._num_others = 0
        self._num_sent = self._num_prompt_tokens = self._num_waiting_tokens = 0
        self._since: list[Sent] = []
        """Requests that were sent after the last quotes were asked for."""

    def __repr__(self) -> str:
        return self.url

    @property
    def index(self) -> int:
        """Return its place among the URLs."""
        return self._index

    @property
    def caches_prefixes(self) -> bool:
        """Tell whether it has a prefix cache; a server that does not say is taken to have one."""
        return self._caches_prefixes

    @property
    def kv_tokens(self) -> int:
        """Return the tokens that its KV cache can hold."""
        return self._kv_tokens

    @property
    def num_requests(self) -> int:
        """Return the requests that it has: those of this router, and of others at the last poll."""
        return self._num_sent + self._num_others

    @property
    def num_in_flight(self) -> int:
        """Return the requests that this router sent to it and that have not ended."""
        return self._num_sent

    @property
    def num_prompt_tokens(self) -> int:
        """Return the prompt tokens of this router's requests that have not ended."""
        return self._num_prompt_tokens

    @property
    def num_waiting_tokens(self) -> int:
        """Return the prompt tokens of those whose answers have not begun."""
        return self._num_waiting_tokens

    @property
    def forecast(self) -> Forecast | None:
        """Return what its last quotes for its default SLO said; None if it gives none."""
        return next(iter(self._forecasts.values()), None)

    @property
    def age_s(self) -> float:
        """Return the time since its state was last asked for; infinite before the first time."""
        return self._now_s() - self._asked_s

    def prefill_s(self, request: Request, num_cached_tokens: int = 0) -> float:
        """Return the time that the request's prefill takes alone on this device."""
        forecast = self._default()
        num_left = max(1, request.num_prompt_tokens - num_cached_tokens)
        return forecast.at(forecast.alone_s, num_left)

    def expected_tpot_s(self) -> float:
        """Return the median TPOT that the replica forecast, or that of its device if it is idle."""
        forecast = self._default()
        return forecast.tpot_s if self.num_requests else forecast.alone_tpot_s

    def expected_ttft_s(self, request: Request, num_cached_tokens: int = 0) -> float:
        """Return the median TTFT of the request if it were sent now."""
        forecast = self._forecast_like(request)
        return self._ttft_s(forecast, forecast.likely_s, request, num_cached_tokens)

    def least_ttft_s(self, request: Request) -> float:
        """Return the TTFT that one request in ten like this one would stay below.

        A replica that caches prefixes may have all of the prompt, so that only the wait is left.
        While it has given no quotes for requests with this TTFT, nothing is known of their wait:
        engines serve requests by their deadlines, so that one may overtake all that wait.
        """
        forecast = self._forecasts.get(request.slo.ttft_s)
        if forecast is None:
            return self.alone_ttft_s(request)
        num_cached = self._most_cached_tokens(request)
        return self._ttft_s(forecast, forecast.least_s, request, num_cached)

    def alone_ttft_s(self, request: Request) -> float:
        """Return the TTFT of a request like this one if the device had nothing else to do."""
        return self.prefill_s(request, self._most_cached_tokens(request))

    def send(self, request: Request) -> Sent:
        """Count a request as sent; `end` is to be called with the result."""
        prefill_s = self.prefill_s(request) if self._forecasts else 0.0
        sent = Sent(request.num_prompt_tokens, prefill_s)
        self._num_sent += 1
        self._num_prompt_tokens += sent.num_prompt_tokens
        self._num_waiting_tokens += sent.num_prompt_tokens
        if self._forecasts:
            self._since.append(sent)
        return sent

    def begin(self, sent: Sent) -> None:
        """Note that the answer has begun, so that the prompt is computed; once is enough."""
        if not sent.has_begun:
            sent.has_begun = True
            self._num_waiting_tokens -= sent.num_prompt_tokens

    def end(self, sent: Sent) -> None:
        """Count a request as ended, whatever became of it."""
        self.begin(sent)
        self._num_sent -= 1
        self._num_prompt_tokens -= sent.num_prompt_tokens

    def introduce(
        self,
        models: Sequence[Mapping[str, object]],
        bytes_per_token: float,
        kv_tokens: int | None,
        *,
        caches_prefixes: bool,
    ) -> None:
        """Take what a server says about itself when it is first reached; forget what was known."""
        self.serve(models)
        self.bytes_per_token = bytes_per_token
        self._kv_tokens = kv_tokens or UNKNOWN_KV_TOKENS
        self._caches_prefixes = caches_prefixes
        self._forecasts = {}
        self.tiers = {}
        self._num_others = 0

    def serve(self, models: Sequence[Mapping[str, object]]) -> None:
        """Take the models that it serves now; LoRA adapters come and go."""
        self.models = {str(model["id"]): model for model in models}
        lengths = [n for model in models if isinstance(n := model.get("max_model_len"), int)]
        self.max_model_len = max(lengths, default=None)

    def begin_poll(self) -> PollBegin:
        """Return what is to be known of the time at which the replica is asked."""
        return PollBegin(self._now_s(), self._num_sent, len(self._since))

    def learn(
        self, begin: PollBegin, num_requests: int, forecasts: Sequence[Forecast] = ()
    ) -> None:
        """Take the state that it told: all its requests, and its forecasts if it gives some.

        The first forecast is that of its default SLO.
        """
        self._asked_s = begin.at_s
        self._num_others = max(0, num_requests - begin.num_in_flight)
        self._forecasts = {each.slo.ttft_s: each for each in forecasts}
        del self._since[: begin.num_since]

    def mark_up(self) -> None:
        self.is_up, self.why_down = True, ""

    def mark_down(self, why: str) -> None:
        """Let no further request go there until it answers again."""
        self.is_up, self.why_down = False, why

    def _ttft_s(
        self,
        forecast: Forecast,
        times_s: Sequence[float],
        request: Request,
        num_cached_tokens: int,
    ) -> float:
        num_left = max(1, request.num_prompt_tokens - num_cached_tokens)
        alone_s = forecast.at(forecast.alone_s, num_left)
        if not self.num_requests:
            return alone_s
        wait_s = max(0.0, forecast.at(forecast.likely_s, num_left) - alone_s)
        since_s = sum([sent.prefill_s for sent in self._since if not sent.has_begun])
        return forecast.at(times_s, num_left) + max(since_s - self.age_s, -wait_s)

    def _most_cached_tokens(self, request: Request) -> int:
        return request.num_prompt_tokens if self._caches_prefixes else 0

    def _default(self) -> Forecast:
        forecast = self.forecast
        assert forecast is not None, _UNASKED
        return forecast

    def _forecast_like(self, request: Request) -> Forecast:
        """Return the forecast for the request's TTFT, or for the one that is most like it."""
        ttft_s = request.slo.ttft_s
        if (found := self._forecasts.get(ttft_s)) is not None:
            return found
        assert self._forecasts, _UNASKED
        return min(
            self._forecasts.values(),
            key=lambda each: abs(math.log(each.slo.ttft_s) - math.log(ttft_s)),
        )


@dataclass(frozen=True, slots=True)
class PollBegin:
    """The time at which a replica was asked, and what this router had sent to it by then."""

    at_s: float
    num_in_flight: int
    num_since: int
