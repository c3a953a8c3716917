"""Clients that come again when a refusal tells them to, after a burst at three times the capacity.

`python -m experiments.quotes second-tries` simulates the same.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections import Counter

from experiments.quotes.replica import CELLS
from slosched.workload import Trace, TraceRequest
from soak.promised import Outcome, ask, ask_at, completion
from soak.stage import DEFAULT, served
from soak.verdicts import Verdicts, machine, say

_SEED = 7


async def _obedient(url: str, request: TraceRequest, start_s: float) -> tuple[Outcome, bool | None]:
    """Return what became of the first try, and whether the second was in time, if there was one."""
    first = await ask_at(url, request, start_s)
    if first.status != 429 or first.retry_after_s is None:
        return first, None
    await asyncio.sleep(first.retry_after_s)
    second = await ask(url, completion(request), request.num_output_tokens)
    return first, second.is_good(request.slo)


async def play(url: str, trace: Trace) -> list[tuple[Outcome, bool | None]]:
    start_s = asyncio.get_running_loop().time() + 1
    return await asyncio.gather(*(_obedient(url, each, start_s) for each in trace.requests))


def main() -> int:
    cells = {cell.device: cell for cell in reversed(CELLS)}  # those with conversations
    parser = argparse.ArgumentParser(prog="python -m soak.second_try", description=__doc__)
    parser.add_argument("--device", choices=sorted(cells), default="l40s")
    parser.add_argument("--burst", type=float, default=20.0, help="seconds")
    options = parser.parse_args()
    cell, verdicts = cells[options.device], Verdicts()
    say(f"{machine()}; {cell}, a burst of {options.burst:g} s")
    with served(cell.model, cell.config.limits, DEFAULT) as url:
        found = asyncio.run(play(url, cell.burst(options.burst, _SEED)))
    statuses = Counter(first.status for first, _ in found)
    say(f"first tries by status: {dict(statuses)}")
    waits_s = sorted(first.retry_after_s or 0.0 for first, second in found if second is not None)
    tries = [second for _, second in found if second is not None]
    verdicts.at_least("requests that came again", len(tries), 1)
    if tries:
        say(f"they were told to come after {waits_s[len(waits_s) // 2]:.0f} s (median)")
        share = 100 * sum(tries) / len(tries)
        verdicts.at_least(f"second tries in time, of {len(tries)}", share, 90, " %")
    say(machine())
    return verdicts.report()


if __name__ == "__main__":
    sys.exit(main())
