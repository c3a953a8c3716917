from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
import threading
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from hypothesis.internal.conjecture import providers

if TYPE_CHECKING:
    from slosched.engine.torch import LoadedModel

# Without a GPU our Triton kernel is interpreted.  Triton reads this when it is first imported, which
# torch or transformers may do in any test.
if not Path("/dev/nvidia0").exists():
    os.environ["TRITON_INTERPRET"] = "1"

# Hundreds of Python processes take part.  Where PYTHONDONTWRITEBYTECODE is set, each of them would
# compile torch, scipy and whatever else it imports again, which takes up to 15 s.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# No time limits, as the machine may be busy; the benchmarks have them.  Every run draws the same
# examples, so hypothesis must not mix in constants of whichever modules are imported.
settings.register_profile("slosched", deadline=None, derandomize=True, max_examples=40)
settings.register_profile("thorough", settings.get_profile("slosched"), max_examples=400)
settings.load_profile("slosched")
providers.is_local_module_file = lambda path: False  # type: ignore[assignment]

# A shell that runs the tests in the background has them ignore Ctrl-C.  Commands that the tests
# start would inherit that, and some tests send them Ctrl-C.
if (
    threading.current_thread() is threading.main_thread()
    and signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Spare the garbage collector what is there for good once thousands of tests are collected.

    It would look through them again and again, which took a twentieth of all the time, and twice
    more when pytest ends.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        atexit.register(gc.unfreeze)  # else libraries complain at the exit of what is left


@pytest.fixture(scope="session")
def smollm2() -> LoadedModel:
    """Return the real model in float32, where greedy output is exact; the first use downloads it."""
    from slosched.engine.torch import load_model

    return load_model("smollm2-135m", device="cpu", dtype="float32", num_threads=1)
