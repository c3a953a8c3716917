"""The processes that run replays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path

import pytest
from processes import is_alive

from slosched.evaluate.capacity import local_pool


def blocked() -> set[int]:
    return set(signal.pthread_sigmask(signal.SIG_BLOCK, []))


def nothing() -> None:
    """Initialize nothing."""


def test_a_process_that_starts_does_not_hear_ctrl_c_and_the_parent_does() -> None:
    before = blocked()
    with local_pool(2)(nothing) as pool:
        in_worker = pool.submit(blocked).result()
    assert signal.SIGINT in in_worker
    assert signal.SIGINT not in blocked() == before


def test_ctrl_c_waits_until_a_process_has_started(monkeypatch: pytest.MonkeyPatch) -> None:
    has_started = []

    def submit(*_: object) -> Future[None]:
        os.kill(os.getpid(), signal.SIGINT)  # to any thread: one other does not block it
        time.sleep(0.1)
        has_started.append(True)
        return Future()

    monkeypatch.setattr(ProcessPoolExecutor, "submit", submit)
    is_over = threading.Event()
    other = threading.Thread(target=is_over.wait)
    other.start()
    try:
        with local_pool(2)(nothing) as pool, pytest.raises(KeyboardInterrupt):
            pool.submit(nothing)
    finally:
        is_over.set()
        other.join()
    assert has_started


_WITH_WORKERS = """
import os, time
from slosched.evaluate.capacity import local_pool

def nothing():
    pass

if __name__ == "__main__":
    with local_pool(2)(nothing) as pool:
        tasks = [pool.submit(time.sleep, 0.1) for _ in range(4)]
        for task in tasks:
            task.result()
        print(*(process.pid for process in pool.processes), flush=True)
        time.sleep(600)
"""


def test_processes_end_when_the_one_that_started_them_is_killed(tmp_path: Path) -> None:
    (tmp_path / "with_workers.py").write_text(_WITH_WORKERS, encoding="utf-8")
    command = [sys.executable, "with_workers.py"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        workers = [int(word) for word in process.stdout.readline().split()]
        process.kill()
        process.wait()
    assert len(workers) == 2
    deadline_s = time.monotonic() + 30
    while (left := [pid for pid in workers if is_alive(pid)]) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left
