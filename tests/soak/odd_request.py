"""Whether one request with an odd promise or odd parameters makes others late.

The same conversations are replayed twice at most of the capacity: alone, and with odd requests
between them, one at a time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Mapping
from typing import Any

from slosched.core import NO_SLO
from slosched.workload import Trace, TraceRequest
from slosched.workload.request import MOST_SEQUENCES
from soak.fuzzer import Sent
from soak.promised import Outcome, ask, ask_at, completion
from soak.stage import Stage, add_options
from soak.verdicts import Verdicts, machine, say
from soak.wire import Wire

_LOAD = 0.9
_TOKENS = 200
ODD: Mapping[str, dict[str, Any]] = {
    "a TTFT of 1 ms": {"slo_ttft_ms": 1},
    "a TTFT of 1 ms, served late": {"slo_ttft_ms": 1, "on_infeasible": "serve"},
    "a TPOT of 1 µs": {"slo_tpot_ms": 0.001},
    "a TPOT of 1 µs, served late": {"slo_tpot_ms": 0.001, "on_infeasible": "serve"},
    "a TPOT just possible": {"slo_ttft_ms": 5000, "slo_tpot_ms": 25, "max_tokens": 2000},
    "an end after 1 ms": {"slo_e2e_ms": 1, "on_infeasible": "serve"},
    "times of a million years": {"slo_ttft_ms": 1e16, "slo_tpot_ms": 1e16},
    "the highest priority": {"priority": -(2**31), "max_tokens": 2000},
    "thirty answers": {"n": 30, "slo_ttft_ms": 10_000, "slo_tpot_ms": 1000},
    "as many answers as are allowed": {"n": MOST_SEQUENCES, "max_tokens": 500},
    "the longest prompt": {"prompt": "longest", "max_tokens": 5},
    "the longest prompt, served late": {
        "prompt": "longest",
        "max_tokens": 5,
        "slo_ttft_ms": 1,
        "on_infeasible": "serve",
    },
    "the longest answer": {"max_tokens": 20_000, "slo_ttft_ms": 1e9, "slo_tpot_ms": 1e9},
}
"""Fields of the odd requests; what they leave out is as in other requests, without an SLO."""


async def _max_model_len(url: str) -> int:
    wire = await Wire.connect(url)
    answer = await wire.ask(Sent("/v1/models", b"", "GET"))
    wire.close()
    found: int = json.loads(answer.text)["data"][0]["max_model_len"]
    return found


def _odd(fields: Mapping[str, Any], max_model_len: int) -> Sent:
    if fields.get("prompt") == "longest":
        fields = {**fields, "prompt": [97] * (max_model_len - 16)}
    request = TraceRequest("odd", 0.0, 500, _TOKENS, NO_SLO)
    return completion(request, fields)


async def _play(
    url: str, trace: Trace, odd: Mapping[str, Sent]
) -> tuple[float, dict[str, Outcome]]:
    """Return the share of the trace's requests that were good, and what became of odd ones."""
    start_s = asyncio.get_running_loop().time() + 1
    gap_s = trace.duration_s / (len(odd) + 1)
    others = [asyncio.create_task(ask_at(url, each, start_s)) for each in trace.requests]
    found = {}
    for place, (name, sent) in enumerate(odd.items()):
        await asyncio.sleep(start_s + (place + 1) * gap_s - asyncio.get_running_loop().time())
        found[name] = asyncio.create_task(ask(url, sent, _TOKENS))
    outcomes = await asyncio.gather(*others)
    good = [each.is_good(r.slo) for each, r in zip(outcomes, trace.requests, strict=True)]
    for task in found.values():
        task.cancel()
    ended = await asyncio.gather(*found.values(), return_exceptions=True)
    odds = zip(found, ended, strict=True)
    return sum(good) / len(good), {n: o for n, o in odds if isinstance(o, Outcome)}


async def _beside(url: str, trace: Trace, names: list[str]) -> tuple[float, dict[str, Outcome]]:
    max_model_len = await _max_model_len(url)
    return await _play(url, trace, {name: _odd(ODD[name], max_model_len) for name in names})


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m soak.odd_request", description=__doc__)
    add_options(parser)
    parser.add_argument("--only", choices=ODD, action="append", help="may be repeated")
    options = parser.parse_args()
    verdicts = Verdicts()
    stage = Stage.on(options.device, options.requests, options.slowdown)
    say(f"{machine()}; {stage}")
    trace, shares = stage.trace(_LOAD), []
    for names in ([], options.only or list(ODD)):
        with stage.served(options.policy) as url:
            share, odd = asyncio.run(_beside(url, trace, names))
        shares.append(100 * share)
        say(f"{len(names)} odd requests: {100 * share:.2f} % of {len(trace)} others are good")
    for name, outcome in odd.items():
        say(f"{name:32} {outcome.status}, TTFT {outcome.ttft_s:.3g} s, TPOT {outcome.tpot_s:.3g} s")
    left = [name for name in names if name not in odd]
    say(f"not ended when all others had: {', '.join(left) or 'none'}")
    lost = shares[0] - shares[1]
    verdicts.at_most("what others lose by all odd requests together", lost, 1, " points")
    say(machine())
    return verdicts.report()


if __name__ == "__main__":
    sys.exit(main())
