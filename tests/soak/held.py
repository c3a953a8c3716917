"""What a server's process holds, asked of its /metrics and of the system."""

from __future__ import annotations

import asyncio
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

from soak.fuzzer import Sent
from soak.verdicts import Verdicts
from soak.wire import Wire

_SETTLE_S = 30.0
"""How long connections may take to be gone: longer than the server waits for headers."""

_NEEDS_A_THREAD = (
    Sent("/tokenize", b'{"prompt": "%b"}' % (b"warm up " * 1000)),
    Sent("/v1/completions", b'{"prompt": "x", "max_tokens": 1, "guided_choice": ["yes", "no"]}'),
)
"""Long texts are tokenized in a thread, and grammars compiled in another."""


@dataclass(frozen=True)
class Held:
    requests: float
    kv_fraction: float
    tasks: float
    files: float
    threads: int
    memory_mib: float

    def is_back(self, before: Held) -> bool:
        """Tell whether everything that belongs to requests and clients is as it was before."""
        return (
            self.requests == self.kv_fraction == 0
            and self.tasks <= before.tasks
            and self.files <= before.files
        )


def figure(page: str, name: str) -> float:
    """Return the sum of a metric over all of its labels."""
    found = re.findall(rf"^{re.escape(name)}(?:{{.*}})? (\S+)$", page, re.MULTILINE)
    return sum(map(float, found))


async def metrics(url: str) -> str:
    wire = await Wire.connect(url)
    page = (await wire.ask(Sent("/metrics", b"", "GET"))).text
    wire.close()
    return page


async def held(url: str, pid: int) -> Held:
    page = await metrics(url)
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return Held(
        requests=figure(page, "vllm:num_requests_running")
        + figure(page, "vllm:num_requests_waiting"),
        kv_fraction=figure(page, "vllm:kv_cache_usage_perc"),
        tasks=figure(page, "slosched:event_loop_tasks"),
        files=figure(page, "process_open_fds"),
        threads=num_threads(pid),
        memory_mib=pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
    )


def num_threads(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/task"))


async def warm_up(url: str) -> None:
    """Let the server start the threads that it starts when they are needed for the first time."""
    for sent in _NEEDS_A_THREAD:
        wire = await Wire.connect(url)
        await wire.ask(sent)
        wire.close()


async def settled(url: str, pid: int, before: Held) -> Held:
    """Return what is held as soon as that is no more than before, or after a while."""
    until_s = time.monotonic() + _SETTLE_S
    while not (found := await held(url, pid)).is_back(before) and time.monotonic() < until_s:
        await asyncio.sleep(0.5)
    return found


def judge_held(verdicts: Verdicts, before: Held, after: Held, max_more_mib: float) -> None:
    """Judge whether a server is as it was before its clients came."""
    verdicts.judge("no request is left", f"{after.requests:g}", after.requests == 0)
    verdicts.judge("no KV block is held", f"{after.kv_fraction:.1%}", after.kv_fraction == 0)
    for name in ("tasks", "files", "threads"):
        old, new = getattr(before, name), getattr(after, name)
        verdicts.judge(f"no more {name} than before", f"{old:g} → {new:g}", new <= old)
    old, new = before.memory_mib, after.memory_mib
    verdicts.judge(
        f"at most {max_more_mib:g} MiB more memory", f"{old:.0f} → {new:.0f} MiB",
        new - old <= max_more_mib,
    )  # fmt: skip
