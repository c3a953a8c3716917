"""All kinds of clients at once, and what happens to a server from outside meanwhile."""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
import time
from pathlib import Path

from soak.clients import CLIENTS, Crowd, again
from soak.fuzzer import Fuzzer, Sent
from soak.health import watched
from soak.heavy import heavy
from soak.held import Held, held, judge_held, settled, warm_up
from soak.nuisances import Nuisances
from soak.program import Program, program
from soak.verdicts import Verdicts, judge_odd, machine, say
from soak.wire import Wire

SERVE = ("--emulate", "h100/llama-3.1-8b", "--slo-ttft", "2s")
_CONNECTIONS = 2000
_MAX_MORE_MIB = 192.0


async def _max_model_len(url: str) -> int:
    wire = await Wire.connect(url)
    answer = await wire.ask(Sent("/v1/models", b"", "GET"))
    wire.close()
    found: int = json.loads(answer.text)["data"][0]["max_model_len"]
    return found


async def _play(
    server: Program, nuisances: Nuisances, seconds: float, seed: int
) -> tuple[Crowd, Held, Held]:
    """Play all clients, let the server settle; return what they saw, and what it held."""
    await warm_up(server.url)
    before = await held(server.url, server.pid)
    rng = random.Random(seed)
    bodies = list(heavy(await _max_model_len(server.url)))
    crowd = Crowd(server.url, rng, time.monotonic() + seconds, Fuzzer(rng), bodies)
    clients = [again(crowd, client) for client, number in CLIENTS.items() for _ in range(number)]
    await asyncio.gather(nuisances.run(seconds), *clients)
    return crowd, before, await settled(server.url, server.pid, before)


def play(seconds: float, seed: int, health_limit_s: float) -> int:
    """Play a crowd; return the status of the process."""
    verdicts = Verdicts()
    say(machine())
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with program(SERVE, module="soak.faulty", log=log) as server:
            nuisances = Nuisances(server, log)
            nuisances.fill_disk()
            with watched(server.url, server.pid) as health:
                crowd, before, after = asyncio.run(_play(server, nuisances, seconds, seed))
            nuisances.judge(verdicts, _CONNECTIONS)
    for kind, number in sorted(crowd.answers.items()):
        say(f"{kind:32} {number:8}")
    say(f"{before}\n{after}\n{machine()}")
    health.but_in(nuisances.pauses_s).judge(verdicts, health_limit_s, "everything")
    judge_odd(verdicts, crowd.odd, "client should have seen")
    judge_held(verdicts, before, after, _MAX_MORE_MIB)
    server.judge_end(verdicts)
    return verdicts.report()
