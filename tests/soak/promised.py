"""Clients that ask for a stream under a promise, and note when its tokens come."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slosched.core import SLO
from slosched.replay.prompts import plain_prompt
from slosched.workload import TraceRequest
from slosched.workload.http_slo import slo_headers
from soak.fuzzer import Sent
from soak.wire import Wire, request_bytes

_LETTERS = (97, 123)
"""Token ids of an emulated device are bytes."""


@dataclass(frozen=True)
class Outcome:
    """What became of a request."""

    status: int
    ttft_s: float = math.inf
    tpot_s: float = math.inf
    retry_after_s: float | None = None

    def is_good(self, slo: SLO) -> bool:
        return self.ttft_s <= slo.ttft_s and self.tpot_s <= slo.tpot_s


def completion(request: TraceRequest, fields: Mapping[str, Any] | None = None) -> Sent:
    """Return a request for a stream of the trace's lengths, with its SLO and further `fields`."""
    body = {
        "prompt": plain_prompt(request.num_prompt_tokens, 0, token_range=_LETTERS),
        "max_tokens": request.num_output_tokens,
        "ignore_eos": True,
        "stream": True,
        **(fields or {}),
    }
    return Sent("/v1/completions", json.dumps(body).encode(), headers=slo_headers(request.slo))


async def ask(url: str, sent: Sent, num_output_tokens: int) -> Outcome:
    """Send a request and follow its stream to the end; its times count from now."""
    now_s = asyncio.get_running_loop().time
    began_s = now_s()
    wire = await Wire.connect(url)
    try:
        wire.writer.write(request_bytes(sent))
        status, headers = await wire.head()
        if status != 200:
            told = headers.get("retry-after")
            return Outcome(status, retry_after_s=None if told is None else float(told))
        times_s, is_whole = [], True
        async for chunk in wire.chunks():
            times_s.append(now_s())
            is_whole &= b'"error"' not in chunk
    finally:
        wire.close()
    if not is_whole or len(times_s) < 2:
        return Outcome(status)
    *before, _ = times_s  # the last chunk says that the stream is done
    tpot_s = (before[-1] - before[0]) / max(1, num_output_tokens - 1)
    return Outcome(status, before[0] - began_s, tpot_s)


async def ask_at(url: str, request: TraceRequest, start_s: float) -> Outcome:
    """Ask when the request of a trace arrives that began at `start_s` of the loop's time."""
    await asyncio.sleep(start_s + request.arrival_s - asyncio.get_running_loop().time())
    return await ask(url, completion(request), request.num_output_tokens)
