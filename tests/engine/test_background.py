"""A device in a thread of its own."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from slosched.core import BatchShape, ScheduledBatch, StepResult
from slosched.engine.background import InBackground

HUNG = """
import threading
from slosched.core import BatchShape, ScheduledBatch
from slosched.engine.background import InBackground

begun = threading.Event()

class Hung:
    def execute(self, batch):
        begun.set()
        threading.Event().wait()

device = InBackground(Hung())
device.launch(ScheduledBatch((), (), (), BatchShape()))
begun.wait()
print("the end", flush=True)
"""


@pytest.mark.e2e
def test_a_process_ends_although_its_device_hangs() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", HUNG],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "the end\n", "")


class Idle:
    def execute(self, batch: ScheduledBatch) -> StepResult:
        raise NotImplementedError(batch)

    def release(self, request_id: str) -> None:
        raise NotImplementedError(request_id)


class Launching:
    """A device whose first step ends once the second is launched."""

    def __init__(self) -> None:
        self._second = threading.Event()
        self._num_launched = 0

    def launch(self, batch: ScheduledBatch) -> Callable[[], StepResult]:
        self._num_launched += 1
        number = self._num_launched
        if number == 2:
            self._second.set()

        def wait() -> StepResult:
            assert self._second.wait(30)
            return StepResult({"r": number})

        return wait

    def execute(self, batch: ScheduledBatch) -> StepResult:
        return self.launch(batch)()

    def release(self, request_id: str) -> None:
        raise NotImplementedError(request_id)


def test_a_device_that_launches_need_not_end_a_step_before_the_next() -> None:
    device = InBackground(Launching())
    waits = [device.launch(ScheduledBatch((), (), (), BatchShape())) for _ in range(2)]
    assert [wait().token_ids["r"] for wait in waits] == [1, 2]


def test_its_thread_ends_with_it() -> None:
    before = set(threading.enumerate())
    device = InBackground(Idle())
    (thread,) = set(threading.enumerate()) - before
    del device
    gc.collect()
    thread.join(30)
    assert not thread.is_alive()
