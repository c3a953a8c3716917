"""What a server's process takes of its machine, under the names that all Prometheus clients use."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path

from slosched.engine.server.prometheus import sample

_STARTED_S = time.time()
"""About the time at which the process started: when this module was imported."""


def process_lines() -> Iterator[str]:
    """Yield the lines of the process's metrics; memory and files are known on Linux alone."""
    times = os.times()
    cpu_s = times.user + times.system
    yield from sample("process_cpu_seconds_total", "counter", "Processor time.", "", cpu_s)
    started = "Time of the start since 1970."
    yield from sample("process_start_time_seconds", "gauge", started, "", _STARTED_S)
    most = float(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    yield from sample("process_max_fds", "gauge", "Files that may be open.", "", most)
    proc = Path("/proc/self")
    if proc.exists():
        pages = [int(number) for number in (proc / "statm").read_text().split()[:2]]
        virtual, resident = (number * resource.getpagesize() for number in pages)
        text = "Memory in use."
        yield from sample("process_resident_memory_bytes", "gauge", text, "", resident)
        yield from sample("process_virtual_memory_bytes", "gauge", "Mapped memory.", "", virtual)
        num_files = len(os.listdir(proc / "fd"))
        yield from sample("process_open_fds", "gauge", "Files that are open.", "", num_files)
