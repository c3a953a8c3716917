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


def test_each_generation_ends_once_whatever_comes_after_all_have_failed() -> None:
    async def scenario() -> tuple[list[Update], list[Update]]:
        loop = asyncio.get_running_loop()
        generations = Generations()
        before, after = (Generation(make_request(name), loop) for name in ("before", "after"))
        generations.add(before)
        generations.fail_all("it hung")
        generations.deliver({"before": (Update(1, EndReason.LENGTH),)})
        generations.add(after)
        generations.fail_all("again")
        async with asyncio.timeout(10):
            for generation in (before, after):
                await generation.ended.wait()
        await asyncio.sleep(0)
        found = [
            [g.updates.get_nowait() for _ in range(g.updates.qsize())] for g in (before, after)
        ]
        return found[0], found[1]

    failed = [Update(None, EndReason.FAULT, "it hung")]
    assert asyncio.run(scenario()) == (failed, failed)
