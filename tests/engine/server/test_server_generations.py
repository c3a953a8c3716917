"""The generations that wait for updates, read by one thread while another one ends them."""

import asyncio
import sys
import threading
from collections.abc import Iterator

import pytest
from factories import make_request

from slosched.core import EndReason
from slosched.engine.server.generations import Generation, Generations, Update


@pytest.fixture
def eager_switches() -> Iterator[None]:
    """Let threads change places after every few instructions."""
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval_s)


@pytest.mark.usefixtures("eager_switches")
def test_any_thread_may_count_the_answers_awaited() -> None:
    loop = asyncio.new_event_loop()
    generations = Generations()
    names = [f"request {index}" for index in range(200)]

    def come_and_go() -> None:
        for _ in range(100):
            for name in names:
                generations.add(Generation(make_request(name), loop))
            generations.deliver({name: (Update(None, EndReason.LENGTH),) for name in names})

    engine_thread = threading.Thread(target=come_and_go)
    engine_thread.start()
    most = 0
    while engine_thread.is_alive():
        most = max(most, generations.num_answers_awaited)
    engine_thread.join()
    loop.close()
    assert 0 < most <= len(names)
    assert generations.num_answers_awaited == 0
