"""GET /steps shows every reader every step, and costs the step loop nothing."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import aiohttp
import pytest
from factories import make_request
from live_server import Live, live, post, with_client
from starlette.types import Message

from slosched.core import (
    BatchShape,
    BlockCopy,
    Limits,
    RequestStatus,
    ScheduledBatch,
    ScheduledChunk,
    StepResult,
)
from slosched.engine.host_time import waited_s
from slosched.engine.loop import StepRecord
from slosched.engine.server.steps import StepFeed, StepsResponse
from slosched.engine.step_lines import End, Head, Line, Missing, Step, parse_line, step_line
from slosched.perfmodel import Measurement

PROMPT = "x" * 20


def make_record(seconds: float = 0.01, chunks: Sequence[tuple[int, int]] = ((1, 7),)) -> StepRecord:
    request = make_request()
    batch = ScheduledBatch(
        chunks=tuple(ScheduledChunk(request, new, prior, True, ()) for new, prior in chunks),
        swap_out=(BlockCopy(0, 0), BlockCopy(1, 1)),
        swap_in=(BlockCopy(2, 2),),
        shape=BatchShape(),
    )
    return StepRecord(0.0, 1.0, batch, StepResult({}, elapsed_s=seconds), (), 0, 1, 0, 0.0)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen in time"
        time.sleep(0.01)


async def listen(client: aiohttp.ClientSession, until: Callable[[list[Line]], bool]) -> list[Line]:
    lines: list[Line] = []
    async with client.get("/steps") as response:
        assert (response.status, response.content_type) == (200, "application/x-ndjson")
        async for text in response.content:
            if (line := parse_line(text)) is not None:
                lines.append(line)
            if until(lines):
                break
    return lines


def steps_of(lines: Sequence[Line]) -> list[Measurement]:
    return [line.measurement for line in lines if isinstance(line, Step)]


def listen_while_one_is_served(
    server: Live, max_tokens: int, until: Callable[[list[Line]], bool], num_listeners: int = 1
) -> list[list[Line]]:
    """Return what each listener received about one request for `PROMPT`."""
    others = server.worker.steps.num_listeners

    async def use(client: aiohttp.ClientSession) -> list[list[Line]]:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(listen(client, until)) for _ in range(num_listeners)]
            while server.worker.steps.num_listeners < others + num_listeners:
                await asyncio.sleep(0.01)
            status, _, _ = await post(client, prompt=PROMPT, max_tokens=max_tokens)
            assert status == 200
        return [task.result() for task in tasks]

    return asyncio.run(with_client(server.url, use))


def test_a_step_is_told_with_its_chunks_its_copies_both_ways_and_its_time() -> None:
    line = parse_line(step_line(make_record(0.0125, [(512, 1024), (1, 300), (1, 300), (3, 0)])))
    measurement = Measurement(((512, 1024), (1, 300), (1, 300), (3, 0)), 0.0125, 3)
    assert line == Step(measurement, waited_s=None)


def test_a_step_is_told_with_what_the_device_waited_for_it_if_it_had_work() -> None:
    """The records begin at 0 and run for a second; one request is running after each plan."""
    before, after = make_record(0.75), replace(make_record(0.5), start_s=1.25, end_s=2.0)
    assert waited_s(before, after) == 0.5
    line = parse_line(step_line(after, before))
    assert isinstance(line, Step)
    assert line.waited_s == 0.5
    [chunk] = before.batch.chunks
    chunk.request.status = RequestStatus.FINISHED
    was_the_last = replace(before, ended=(chunk.request,))
    assert waited_s(was_the_last, after) is None


def test_after_missed_steps_nobody_says_what_the_device_waited_for() -> None:
    feed = StepFeed(max_waiting=2)
    with feed.listen() as listener:
        for _ in range(3):
            feed.publish(make_record(0.5))
        told = [parse_line(line) for line in listener.lines(9)]
        assert listener.take_missed() == 1
        feed.publish(make_record(0.5))
        told += [parse_line(line) for line in listener.lines(9)]
    assert [line.waited_s for line in told if isinstance(line, Step)] == [None, 0.0, None]


def test_a_slow_listener_loses_the_latest_and_nobody_waits_for_it() -> None:
    feed = StepFeed(max_waiting=8)
    with feed.listen() as slow, feed.listen() as quick:
        heard = []
        for i in range(1, 101):
            feed.publish(make_record(float(i)))
            heard += quick.take(10)
        assert [record.result.elapsed_s for record in heard] == list(range(1, 101))
        assert quick.take_missed() == 0
        assert [record.result.elapsed_s for record in slow.take(5)] == [1, 2, 3, 4, 5]
        assert slow.take_missed() == 92
        assert slow.take_missed() == 0
        feed.publish(make_record(101.0))
        assert [record.result.elapsed_s for record in slow.take(9)] == [6, 7, 8, 101]
        assert len(quick.take(9)) == 1
    feed.publish(make_record(102.0))
    assert slow.take(9) == quick.take(9) == []


def test_a_step_without_work_for_the_device_is_none() -> None:
    feed = StepFeed()
    with feed.listen() as listener:
        feed.publish(make_record(0.0))
        assert listener.take(1) == []
        assert listener.take_missed() == 0


def test_listeners_come_and_go_while_steps_are_published() -> None:
    """Listeners run in several threads, and each gets an unbroken sequence of steps."""
    feed = StepFeed(max_waiting=1_000_000)
    over = threading.Event()

    def publish() -> None:
        i = 0
        while not over.is_set():
            i += 1
            feed.publish(make_record(float(i)))

    publisher = threading.Thread(target=publish)
    publisher.start()
    try:
        for _ in range(50):
            with feed.listen() as first, feed.listen() as second:
                time.sleep(0.001)
            for listener in (first, second):
                told = [r.result.elapsed_s for r in listener.take(10**6)]
                assert told == [told[0] + i for i in range(len(told))] if told else True
    finally:
        over.set()
        publisher.join()
    assert feed.num_listeners == 0


def test_a_queue_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one step, not 0"):
        StepFeed(0)


def test_every_step_of_a_request_with_the_time_that_the_device_took() -> None:
    limits = Limits(max_num_batched_tokens=8)
    with live(limits=limits) as server, server.worker.steps.listen() as beside:
        [lines] = listen_while_one_is_served(server, 4, lambda lines: len(steps_of(lines)) == 6)
        records = beside.take(100)
    head, *steps = lines
    assert isinstance(head, Head)
    assert head.provenance == {"model": "echo"}
    chunks = [m.chunks for m in steps_of(steps)]
    assert chunks == [((8, 0),), ((8, 8),), ((4, 16),), ((1, 20),), ((1, 21),), ((1, 22),)]
    assert [m.seconds for m in steps_of(steps)] == [r.result.elapsed_s for r in records]
    assert [m.shape for m in steps_of(steps)] == [r.batch.shape for r in records]


def test_two_listeners_are_told_the_same() -> None:
    with live() as server:
        first, second = listen_while_one_is_served(
            server, 30, lambda lines: len(steps_of(lines)) == 30, num_listeners=2
        )
        assert first == second
        wait_until(lambda: server.worker.steps.num_listeners == 0)


def test_who_cannot_keep_up_is_told_how_many_steps_are_missing() -> None:
    """A queue of four is full in less than a millisecond of these steps."""
    with live() as server:
        server.worker.steps = StepFeed(max_waiting=4)

        def told(lines: list[Line]) -> int:
            missing = sum(line.num_steps for line in lines if isinstance(line, Missing))
            return len(steps_of(lines)) + missing

        [lines] = listen_while_one_is_served(server, 400, lambda lines: told(lines) == 400)
        assert len(steps_of(lines)) < 100
        assert any(isinstance(line, Missing) for line in lines)


def test_a_client_that_does_not_read_loses_steps_and_hears_so_when_it_does() -> None:
    """Uses ASGI directly, where a client that does not read is a `send` that does not return."""
    feed = StepFeed(max_waiting=8)
    sent = b""

    async def use() -> None:
        may_send, why_over = asyncio.Event(), None

        async def send(message: Message) -> None:
            nonlocal sent
            await may_send.wait()
            sent += message.get("body", b"")

        async def receive() -> Message:
            # the client does not disconnect
            return await asyncio.get_running_loop().create_future()

        response = StepsResponse(feed, {"model": "m"}, lambda: why_over)
        task = asyncio.create_task(response({"type": "http"}, receive, send))
        while not feed.num_listeners:
            await asyncio.sleep(0.01)
        for i in range(1, 101):
            feed.publish(make_record(float(i)))
        why_over = "enough"
        may_send.set()
        await task

    asyncio.run(use())
    head, *steps, missing, end = map(parse_line, sent.splitlines())
    assert head == Head({"model": "m"})
    assert [step.seconds for step in steps_of(steps)] == list(range(1, 9))
    assert (missing, end) == (Missing(92), End("enough"))
    assert feed.num_listeners == 0


def test_a_client_that_goes_away_is_forgotten() -> None:
    with live() as server:
        [lines] = listen_while_one_is_served(server, 5, lambda lines: len(lines) == 2)
        assert isinstance(lines[0], Head)
        wait_until(lambda: server.worker.steps.num_listeners == 0)
        assert server.post(prompt="x", max_tokens=3)[0] == 200


def test_a_client_that_goes_away_while_the_server_idles_is_forgotten() -> None:
    with live() as server:
        asyncio.run(with_client(server.url, lambda client: listen(client, lambda lines: True)))
        wait_until(lambda: server.worker.steps.num_listeners == 0)


def test_an_idle_stream_shows_that_it_lives() -> None:
    async def read(client: aiohttp.ClientSession) -> list[bytes]:
        async with client.get("/steps") as response:
            return [await response.content.readline() for _ in range(2)]

    with live() as server:
        _head, heartbeat = asyncio.run(with_client(server.url, read))
        assert heartbeat == b"\n"
        assert parse_line(heartbeat) is None


def test_a_shutdown_ends_the_stream_after_the_last_step() -> None:
    """The listener gets the steps that were still running when the drain began."""
    lines: list[Line] = []

    async def use(client: aiohttp.ClientSession) -> None:
        lines.extend(await listen(client, lambda lines: False))

    with live() as server:
        reader = threading.Thread(target=lambda: asyncio.run(with_client(server.url, use)))
        reader.start()
        wait_until(lambda: server.worker.steps.num_listeners == 1)
        assert server.post(prompt=PROMPT, max_tokens=10)[0] == 200
    reader.join()
    assert len(steps_of(lines)) == 10
    assert lines[-1] == End("it has shut down")
    wait_until(lambda: server.worker.steps.num_listeners == 0)


def test_a_failed_step_is_not_told_and_a_broken_engine_ends_the_stream() -> None:
    async def use(client: aiohttp.ClientSession) -> list[Line]:
        reader = asyncio.create_task(listen(client, lambda lines: False))
        while not server.worker.steps.num_listeners:
            await asyncio.sleep(0.01)
        assert (await post(client, prompt="x", max_tokens=2))[0] == 200
        server.device.fault = RuntimeError("it burns")
        for _ in range(2):
            assert (await post(client, prompt="x", max_tokens=2))[0] == 500
        return await reader

    with live(max_consecutive_faults=2) as server:
        lines = asyncio.run(with_client(server.url, use))
    assert len(steps_of(lines)) == 2
    assert isinstance(lines[-1], End)
    assert "it burns" in lines[-1].reason


def test_a_server_that_is_broken_is_not_listened_to() -> None:
    with live(max_consecutive_faults=1) as server:
        server.device.fault = RuntimeError("it burns")
        assert server.post(prompt="x")[0] == 500
        status, text = server.get("/steps")
        assert status == 503
        assert "it burns" in text


def test_a_head_request_is_answered_at_once() -> None:
    async def ask(client: aiohttp.ClientSession) -> int:
        async with client.head("/steps") as response:
            return response.status

    with live() as server:
        assert asyncio.run(with_client(server.url, ask)) == 200
        wait_until(lambda: server.worker.steps.num_listeners == 0)
