"""What happens to a server and its clients from outside: processes that stand still, a full disk."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

from soak.fuzzer import Sent
from soak.held import figure, metrics
from soak.program import Program
from soak.verdicts import Verdicts
from soak.wire import Wire, request_bytes

_DISK_BYTES = 20_000
"""How large the server's log may become until its disk is full."""
_STILL_S = 1.5
_ASK_AGAIN_S, _PATIENCE_S = 0.2, 60.0
_TOKENS = 100
"""Enough to be in the middle of, and few enough to be whole before the next fault of a step."""
_STREAM = b'{"prompt": "still", "max_tokens": %d, "ignore_eos": true, "stream": true}' % _TOKENS


@dataclass
class Nuisances:
    """What was done to a server, and what came of it."""

    server: Program
    log: Path
    pauses_s: list[tuple[float, float]] = field(default_factory=list)
    """When the server's process stood still."""
    most_files: float = 0.0
    """The most files that the server had open."""
    num_missing: float = 0.0
    """Log lines that could not be written."""
    client_got: list[int] = field(default_factory=list)
    """Events that clients got which had stood still in the middle; -1 for the fault of a step."""

    def fill_disk(self) -> None:
        """Let every file of the server be full from a size on that its log soon has."""
        hard = resource.prlimit(self.server.pid, resource.RLIMIT_FSIZE)[1]
        resource.prlimit(self.server.pid, resource.RLIMIT_FSIZE, (_DISK_BYTES, hard))

    async def run(self, seconds: float) -> None:
        """Do everything once in each third of the time, and make room on the disk in the last."""
        sampler = asyncio.create_task(self._sample())
        for third in range(3):
            await asyncio.sleep(seconds / 6)
            if third == 2:
                page = await metrics(self.server.url)
                self.num_missing = figure(page, "slosched:log_lines_missing_total")
                os.truncate(self.log, 0)
            await self._still_server()
            self.client_got.append(await self._still_client())
            await asyncio.sleep(max(0.0, seconds / 6 - 3 * _STILL_S))
        sampler.cancel()

    async def _sample(self) -> None:
        while True:
            page = await metrics(self.server.url)
            self.most_files = max(self.most_files, figure(page, "process_open_fds"))
            await asyncio.sleep(1)

    async def _still_server(self) -> None:
        began_s = time.monotonic()
        os.kill(self.server.pid, signal.SIGSTOP)
        await asyncio.sleep(_STILL_S)
        os.kill(self.server.pid, signal.SIGCONT)
        self.pauses_s.append((began_s, time.monotonic()))

    async def _still_client(self) -> int:
        """Let a client in a process of its own stand still; return how many events it got."""
        command = (sys.executable, "-m", "soak.nuisances", self.server.url)
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        assert process.stdout is not None
        await process.stdout.readline()  # it has its first event
        with contextlib.suppress(ProcessLookupError):  # its stream has ended by a fault already
            process.send_signal(signal.SIGSTOP)
            await asyncio.sleep(_STILL_S)
            process.send_signal(signal.SIGCONT)
        found, _ = await process.communicate()
        return int(found)

    def judge(self, verdicts: Verdicts, num_connections: int) -> None:
        verdicts.at_least("connections at once", self.most_files, num_connections)
        num_whole = sum(number >= _TOKENS for number in self.client_got)
        verdicts.judge(
            "clients that stood still got their whole stream, or the fault of a step",
            f"{num_whole} of {len(self.client_got)}, events: {self.client_got}",
            num_whole > 0 and all(number >= _TOKENS or number == -1 for number in self.client_got),
        )
        verdicts.at_least("log lines that a full disk cost", self.num_missing, 1)
        says_so = "log lines are missing here" in self.log.read_text()
        verdicts.judge("the log says so when there is room again", str(says_so), says_so)


async def _begun_stream(url: str) -> Wire:
    """Return a connection on which a stream has begun; ask again while requests are refused."""
    while True:
        wire = await Wire.connect(url)
        wire.writer.write(request_bytes(Sent("/v1/completions", _STREAM)))
        if b" 200 " in await wire.reader.readline():
            await wire.reader.readuntil(b"data: ")
            return wire
        wire.close()
        await asyncio.sleep(_ASK_AGAIN_S)


async def _read_stream(url: str) -> int:
    """Return the number of events of a stream; -1 if it ends with an error."""
    wire = await asyncio.wait_for(_begun_stream(url), _PATIENCE_S)
    sys.stdout.write("begun\n")
    sys.stdout.flush()
    found = 1
    with contextlib.suppress(asyncio.IncompleteReadError):
        async for line in _lines(wire):
            if b'"error"' in line:
                return -1
            if b"[DONE]" in line:
                break
            found += line.startswith(b"data: ")
    return found


async def _lines(wire: Wire) -> AsyncIterator[bytes]:
    while line := await wire.reader.readline():
        yield line


if __name__ == "__main__":
    sys.stdout.write(f"{asyncio.run(_read_stream(sys.argv[1]))}\n")
