"""Half a million fuzzed bodies for the torch engine, and what they leave behind."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections import Counter
from dataclasses import dataclass, field

from soak.clients import DELIBERATE
from soak.fuzzer import Fuzzer, Sent
from soak.health import LONGEST_TURN, Health, judge_turns, watched
from soak.held import Held, figure, held, judge_held, metrics, num_threads, settled, warm_up
from soak.program import Program, program
from soak.verdicts import Verdicts, judge_odd, machine, say
from soak.wire import Answer, Wire

SERVE = (
    *("tiny-random", "--calibrate", "5s", "--slo-ttft", "60s", "--slo-tpot", "10s"),
    *("--prefix-cache", "hash", "--no-log-requests", "--log-interval", "off"),
)
_AT_ONCE = 24
_WARM_UP = 0.1
"""The share of the bodies after which memory is looked at for the first time."""
_TELL_S = 20.0
_ANSWER_S = 120.0
_NUM_NAMED = 3
"""Slow answers of /health whose bodies are printed."""
_MAX_MORE_MIB = 128.0


@dataclass
class Seen:
    """The answers of a run."""

    statuses: Counter[str] = field(default_factory=Counter)
    odd: list[str] = field(default_factory=list)
    """Requests with an answer that none should have."""
    num_sent: int = 0
    times_s: list[tuple[float, float]] = field(default_factory=list)
    """When the answer to each body was waited for, by the number of the body."""

    def note(self, sent: Sent, answer: Answer) -> None:
        self.statuses[f"{sent.path.partition('?')[0]} {answer.status}"] += 1
        if answer.status not in DELIBERATE:
            self.odd.append(f"{answer.status} {answer.text[:300]} to {sent}"[:3000])


async def _send(url: str, fuzzer: Fuzzer, seen: Seen, num_bodies: int, until_s: float) -> None:
    """Send bodies one after the other until all clients together have sent so many."""
    wire = await Wire.connect(url)
    while seen.num_sent < num_bodies and time.monotonic() < until_s:
        number, sent = seen.num_sent, fuzzer.next()
        seen.num_sent += 1
        seen.times_s.append((time.monotonic(), math.inf))
        try:
            answer = await asyncio.wait_for(wire.ask(sent), _ANSWER_S)
        except (EOFError, ConnectionError, TimeoutError, ValueError) as error:
            seen.odd.append(f"{error!r} instead of an answer to {sent}"[:3000])
            wire.close()
            wire = await Wire.connect(url)
            continue
        seen.times_s[number] = seen.times_s[number][0], time.monotonic()
        seen.note(sent, answer)
        if answer.closes:
            wire.close()
            wire = await Wire.connect(url)
    wire.close()


async def _tell(server: Program, seen: Seen, num_bodies: int) -> None:
    began_s = time.monotonic()
    while True:
        await asyncio.sleep(_TELL_S)
        rate = seen.num_sent / (time.monotonic() - began_s)
        turn_s = figure(await metrics(server.url), LONGEST_TURN)
        say(
            f"{seen.num_sent} of {num_bodies} bodies, {rate:.0f}/s, odd: {len(seen.odd)}, "
            f"threads: {num_threads(server.pid)}, longest turn: {1000 * turn_s:.0f} ms"
        )


def _name_slow(seen: Seen, health: Health, limit_s: float, seed: int) -> None:
    """Print the bodies that were being answered while /health took longest and too long."""
    slow = sorted((p for p in health.probes if p.own_s > limit_s), key=lambda p: -p.own_s)
    beside = {
        number: probe
        for probe in slow[:_NUM_NAMED]
        for number, (began_s, ended_s) in enumerate(seen.times_s)
        if began_s < probe.began_s + probe.took_s and ended_s > probe.began_s
    }
    fuzzer = Fuzzer(random.Random(seed))
    for number in range(max(beside, default=-1) + 1):
        sent = fuzzer.next()
        if number in beside:
            say(f"beside /health of {1000 * beside[number].own_s:.0f} ms: {sent!s:.300}")


async def _play(
    server: Program, num_bodies: int, seconds: float, seed: int, seen: Seen
) -> tuple[Held, Held]:
    """Send the bodies; return what the server held after the first ones, and at the end."""
    until_s = time.monotonic() + seconds
    fuzzer = Fuzzer(random.Random(seed))
    telling = asyncio.create_task(_tell(server, seen, num_bodies))
    await warm_up(server.url)
    first = await held(server.url, server.pid)
    for share in (_WARM_UP, 1.0):
        most = int(share * num_bodies)
        clients = (_send(server.url, fuzzer, seen, most, until_s) for _ in range(_AT_ONCE))
        await asyncio.gather(*clients)
        after = await settled(server.url, server.pid, first)
        say(f"after {seen.num_sent} bodies: {after}")
        if share == _WARM_UP:
            before = after
    telling.cancel()
    return before, after


def play(num_bodies: int, seconds: float, seed: int, health_limit_s: float) -> int:
    """Send fuzzed bodies to a torch engine, for so long at most; return the process's status."""
    verdicts, seen = Verdicts(), Seen()
    say(machine())
    with program(SERVE) as server:
        began_s = time.monotonic()
        with watched(server.url, server.pid) as health:
            before, after = asyncio.run(_play(server, num_bodies, seconds, seed, seen))
        took_s = time.monotonic() - began_s
        page = asyncio.run(metrics(server.url))
    for name, number in sorted(seen.statuses.items()):
        say(f"{name:40} {number:8}")
    say(f"{seen.num_sent} bodies in {took_s:.0f} s; {machine()}")
    _name_slow(seen, health, health_limit_s, seed)
    health.judge(verdicts, health_limit_s, "every body")
    judge_turns(verdicts, page, health_limit_s)
    judge_odd(verdicts, seen.odd, "body should cause")
    judge_held(verdicts, before, after, _MAX_MORE_MIB)
    server.judge_end(verdicts)
    return verdicts.report()
