"""Requests whose bodies cannot bring an SLO, or whose answers do not tell a refusal.

vLLM asks its engine for them without the fields of their bodies, or makes an error, an empty text
or a made-up answer of an output that was refused.  So what such a request asks of the engine is
watched: its SLO is added there, and a refusal is seen there.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from contextvars import ContextVar
from typing import Any

from slosched.integrations.vllm.slo import INVALID
from slosched.workload.http_slo import REJECTED

_WATCHING = "_slosched_watches"
"""The attribute of an engine client that is watched."""


class Watched:
    """What one HTTP request asks of the engine, and what came of it."""

    def __init__(self, wanted: Mapping[str, object]) -> None:
        self._wanted = wanted
        self.refusal = ""
        """The `stop_reason` of an output that was refused."""
        self.has_begun = False
        """Whether there is a first token."""

    def asked(self, params: Any) -> Any:
        """Return sampling parameters with this request's SLO; what they say themselves stays."""
        if not self._wanted:
            return params
        params = params.clone()
        params.extra_args = {**self._wanted, **(params.extra_args or {})}
        return params

    async def seen(self, outputs: AsyncGenerator[Any, None]) -> AsyncIterator[Any]:
        """Yield the outputs of one engine request, and note what they tell."""
        async with aclosing(outputs):
            async for output in outputs:
                for each in output.outputs:
                    self.has_begun |= bool(each.token_ids)
                    if str(each.stop_reason).startswith((f"{REJECTED}:", f"{INVALID}:")):
                        self.refusal = each.stop_reason
                yield output


_current: ContextVar[Watched | None] = ContextVar("slosched_watched", default=None)


@contextmanager
def watching(client: Any, wanted: Mapping[str, object]) -> Iterator[Watched]:
    """Watch what this task, and those that it starts, ask of vLLM's engine client."""
    if not hasattr(client, _WATCHING):
        client.generate = _watched(client.generate)
        setattr(client, _WATCHING, True)
    watched = Watched(wanted)
    token = _current.set(watched)
    try:
        yield watched
    finally:
        _current.reset(token)


def _watched(generate: Callable[..., Any]) -> Callable[..., Any]:
    """Return an engine client's `generate`, for requests that are watched and for all others."""

    def watched_generate(prompt: Any, sampling_params: Any, *args: Any, **options: Any) -> Any:
        watched = _current.get()
        if watched is None:
            return generate(prompt, sampling_params, *args, **options)
        return watched.seen(generate(prompt, watched.asked(sampling_params), *args, **options))

    return watched_generate
