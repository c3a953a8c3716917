"""Whatever happens, every request is answered once and no KV block is lost."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest
from live_server import (
    Live,
    live,
    parse_events,
    post,
    server_process,
    stream,
    with_client,
)

from slosched.core import (
    SLO,
    EndReason,
    Limits,
    Policy,
    RequestStatus,
    SchedulerOutput,
    SchedulerView,
)
from slosched.engine.server import ByteTokenizer, ServerStartError
from slosched.engine.server.run import listen
from slosched.engine.server.worker import NotServingError
from slosched.kv import PrefixCaching
from slosched.policy import FCFS, SLOAware
from slosched.policy.kit.drop import Drop
from slosched.policy.spec import make_policy


def reasons(server: Live) -> list[EndReason | None]:
    return [record.end_reason for record in server.worker.records]


@pytest.mark.parametrize("is_streaming", [False, True])
def test_a_rejection_is_a_429_in_both_modes(is_streaming: bool) -> None:
    with live(FCFS(drop=Drop.INFEASIBLE)) as server:
        status, answer, headers = server.post(prompt="x", slo_ttft_ms=1e-3, stream=is_streaming)
        assert status == 429
        assert headers["retry-after"] == "1"
        assert answer["error"]["code"] == "slo_infeasible"
        assert answer["error"]["reason"] in ("expired", "infeasible")
        assert answer["error"]["reason"] in answer["error"]["message"]
        assert server.post(prompt="x", slo_ttft_ms=60_000, stream=False)[0] == 200
        assert [r.status for r in server.worker.records] == ["rejected", "finished"]


@contextmanager
def raw_request(server: Live, body: dict[str, Any]) -> Iterator[socket.socket]:
    """Yield the connection of a client that can disconnect at any time."""
    address = urlsplit(server.url)
    content = json.dumps(body).encode()
    with socket.create_connection((address.hostname, address.port), timeout=30) as client:
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%b" % (len(content), content)
        )
        yield client


def test_a_client_that_goes_away_in_mid_stream_frees_its_blocks() -> None:
    with live() as server:
        with raw_request(server, {"prompt": "abc", "max_tokens": 500, "stream": True}) as client:
            received = b""
            while received.count(b"data: ") < 3:
                received += client.recv(4096)
            server.device.gate.clear()
        server.device.gate.set()
        server.device.released.get(timeout=10)
        assert server.num_held_blocks == 0
        assert server.worker.scheduler.num_unfinished == 0
        assert server.post(prompt="x")[0] == 200
        [gone, _] = server.worker.records
        assert (gone.status, gone.end_reason) == (RequestStatus.ABORTED, EndReason.CLIENT)
        assert 3 <= gone.num_output_tokens < 500


@pytest.mark.parametrize("is_streaming", [False, True])
def test_a_client_that_goes_away_before_its_answer_frees_its_blocks(is_streaming: bool) -> None:
    with live(limits=Limits(max_num_seqs=1)) as server:
        server.device.gate.clear()
        body = {"prompt": "abc", "max_tokens": 500, "stream": is_streaming}
        with raw_request(server, body):
            assert server.device.entered.wait(10)
            with raw_request(server, body):  # waits in the queue behind the first one
                pass
        server.device.gate.set()
        for _ in range(2):
            server.device.released.get(timeout=10)
        assert server.num_held_blocks == 0
        assert server.post(prompt="x")[0] == 200
        assert reasons(server)[:2] == [EndReason.CLIENT] * 2


def test_a_hundred_clients_at_once() -> None:
    async def many(client: aiohttp.ClientSession) -> list[Any]:
        prompts = [f"client {i}: " for i in range(100)]
        asks = [
            stream(client, prompt=p, max_tokens=20)
            if i % 2
            else post(client, prompt=p, max_tokens=20)
            for i, p in enumerate(prompts)
        ]
        return list(zip(prompts, await asyncio.gather(*asks), strict=True))

    with live(num_blocks=128) as server:  # fewer blocks than all requests need
        answers = asyncio.run(with_client(server.url, many))
        for prompt, answer in answers:
            if isinstance(answer, list):
                text = "".join(event["choices"][0]["text"] for event in answer)
            else:
                text = answer[1]["choices"][0]["text"]
            assert text == (prompt * 3)[:20]
        assert reasons(server) == [EndReason.LENGTH] * 100
        assert len({record.request_id for record in server.worker.records}) == 100
        assert server.num_held_blocks == 0


class Illiterate(ByteTokenizer):
    """A tokenizer that cannot decode an exclamation mark."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        if ord("!") in token_ids:
            raise KeyError("no such token")
        return super().decode(token_ids, skip_special_tokens=skip_special_tokens)


def test_an_answer_that_cannot_be_written_ends_with_an_error_and_counts_as_a_fault() -> None:
    with live(tokenizer=Illiterate()) as server:
        *chunks, last = server.events(prompt="ab!cdefg", max_tokens=100)
        assert [chunk["choices"][0]["text"] for chunk in chunks] == ["a", "b"]
        assert last["error"]["code"] == "engine_fault"
        assert "KeyError" in last["error"]["message"]
        status, answer, _ = server.post(prompt="ab!cdefg", max_tokens=100)
        assert (status, answer["error"]["code"]) == (500, "engine_fault")
        assert server.post(prompt="ok", max_tokens=2)[0] == 200
        assert reasons(server) == [EndReason.FAULT, EndReason.FAULT, EndReason.LENGTH]
        assert server.num_held_blocks == 0


class Panic(BaseException):
    """What a library in Rust raises where it has a bug: no Exception."""


@dataclass
class Stubborn(Policy):
    """FCFS, until it is told to raise."""

    how: str = ""

    def schedule(self, view: SchedulerView) -> SchedulerOutput:
        if self.how == "panic":
            raise Panic("index out of bounds")
        if self.how == "raise as one finishes" and view.num_finishing:
            raise KeyError("a bug")
        if self.how == "illegal":
            return SchedulerOutput(num_scheduled_tokens={"nobody": 1})
        if self.how == "stall":
            return SchedulerOutput()
        if self.how == "raise":
            raise KeyError("a bug")
        return FCFS().schedule(view)


async def read_until_text(response: aiohttp.ClientResponse) -> str:
    """Return the text of a stream up to its first token."""
    data, _ = await response.content.readchunk()
    return data.decode()


def test_a_fault_of_the_device_costs_its_batch_and_nothing_else() -> None:
    async def scenario(client: aiohttp.ClientSession) -> tuple[str, Any]:
        body = {"prompt": "abc", "max_tokens": 400, "stream": True}
        async with client.post("/v1/completions", json=body) as response:
            text = await read_until_text(response)
            server.device.gate.clear()
            server.device.entered.clear()
            server.device.fault = RuntimeError("the device fell off the bus")
            whole = asyncio.create_task(post(client, prompt="whole", max_tokens=3))
            server.device.gate.set()
            text += await response.text()
        return text, await whole

    with live() as server:
        text, (status, answer, _) = asyncio.run(with_client(server.url, scenario))
        *chunks, last = parse_events(text)
        assert len(chunks) >= 1
        assert last["error"]["code"] == "engine_fault"
        assert "the device fell off the bus" in last["error"]["message"]
        assert (status, answer["error"]["code"]) == (500, "engine_fault")
        server.device.fault = None
        assert server.num_held_blocks == 0
        assert server.get("/health")[0] == 200
        assert server.post(prompt="ok", max_tokens=2)[1]["choices"][0]["text"] == "ok"
        assert reasons(server) == [EndReason.FAULT, EndReason.FAULT, EndReason.LENGTH]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_panic_of_the_device_costs_its_batch_and_nothing_else(overlap: bool) -> None:
    with live(overlap=overlap) as server:
        server.device.fault = Panic("index out of bounds")
        status, answer, _ = server.post(prompt="abc", max_tokens=3)
        assert (status, answer["error"]["code"]) == (500, "engine_fault")
        assert "index out of bounds" in answer["error"]["message"]
        server.device.fault = None
        assert server.post(prompt="ok", max_tokens=2)[1]["choices"][0]["text"] == "ok"
        assert reasons(server) == [EndReason.FAULT, EndReason.LENGTH]


def test_a_fault_after_which_spoilt_blocks_may_be_left_ends_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("a bug in cleaning up")

    with live() as server:
        server.device.fault = RuntimeError("gone")
        monkeypatch.setattr(server.worker.scheduler, "on_failed_step", fail)
        status, answer, _ = server.post(prompt="x", max_tokens=1)
        assert status == 500
        assert "a bug in cleaning up" in answer["error"]["message"]
        assert server.worker.wait_stopped(5)
        assert server.num_held_blocks == 0


def test_a_device_that_never_recovers_ends_the_engine() -> None:
    with live(max_consecutive_faults=3) as server:
        server.device.fault = RuntimeError("gone")
        for _ in range(3):
            assert server.get("/health")[0] == 200
            assert server.post(prompt="x", max_tokens=1)[0] == 500
        assert server.worker.wait_stopped(5)
        assert "3 steps failed" in str(server.worker.why_broken)
        assert "gone" in str(server.worker.why_broken)


@pytest.mark.parametrize("how", ["illegal", "stall", "raise", "panic"])
def test_a_bug_of_the_policy_ends_everything_with_a_reason(how: str) -> None:
    policy = Stubborn()

    async def scenario(client: aiohttp.ClientSession) -> str:
        body = {"prompt": "abc", "max_tokens": 400, "stream": True}
        async with client.post("/v1/completions", json=body) as response:
            text = await read_until_text(response)
            policy.how = how
            return text + await response.text()

    with live(policy) as server:
        error = parse_events(asyncio.run(with_client(server.url, scenario)))[-1]["error"]
        assert error["code"] == "engine_fault"
        assert "planned" in error["message"]
        assert server.worker.wait_stopped(5)
        assert "planned" in str(server.worker.why_broken)
        assert reasons(server) == [EndReason.FAULT]
        assert server.num_held_blocks == 0


def test_a_bug_that_also_breaks_the_cleaning_up_is_told_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("cannot clean up")

    with live(Stubborn("raise")) as server:
        monkeypatch.setattr(server.worker, "_abort_all", fail)
        status, answer, _ = server.post(prompt="x", max_tokens=1)
        assert status == 500
        assert "planned or booked, with KeyError: 'a bug'" in answer["error"]["message"]
        assert server.worker.wait_stopped(5)
        assert "planned or booked, with KeyError: 'a bug'" in str(server.worker.why_broken)
        monkeypatch.undo()
        server.worker._abort_all(EndReason.FAULT)


def test_an_answer_whose_last_token_is_lost_in_a_bug_is_an_error_and_not_a_short_answer() -> None:
    async def scenario(client: aiohttp.ClientSession) -> tuple[Any, tuple[int, Any, Any]]:
        body = {"prompt": "x", "max_tokens": 400, "stream": True}
        async with client.post("/v1/completions", json=body) as response:
            text = await read_until_text(response)
            server.device.gate.clear()  # so that the other comes before it ends, however slow it is
            short = asyncio.create_task(post(client, prompt="abcdef", max_tokens=3))
            while server.worker.num_cut_short < 2:
                await asyncio.sleep(0.001)
            server.device.gate.set()
            text += await response.text()
        return parse_events(text)[-1], await short

    with live(Stubborn("raise as one finishes"), overlap=True) as server:
        last, (status, answer, _) = asyncio.run(with_client(server.url, scenario))
        assert status == 500
        for error in (last["error"], answer["error"]):
            assert error["code"] == "engine_fault"
            assert "planned or booked, with KeyError: 'a bug'" in error["message"]


def test_a_request_that_the_engine_loses_sight_of_is_answered() -> None:
    with live() as server:
        server.device.release_fault = RuntimeError("cannot even release")
        status, answer, _ = server.post(prompt="x", max_tokens=1)
        assert status == 500
        assert "cannot even release" in answer["error"]["message"]
        assert server.worker.why_not_serving is not None


def test_even_if_the_engine_thread_dies_everybody_is_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(record: object) -> None:
        raise ZeroDivisionError("a bug in the bookkeeping")

    with live() as server:
        monkeypatch.setattr(server.worker.metrics, "observe_step", fail)
        status, answer, _ = server.post(prompt="x", max_tokens=1)
        assert status == 500
        assert "a bug in the bookkeeping" in answer["error"]["message"]
        assert server.worker.wait_stopped(5)
        assert "thread died" in str(server.worker.why_not_serving)


def test_those_that_come_together_are_answered_though_the_first_of_them_kills_the_engine_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario(client: aiohttp.ClientSession) -> list[tuple[int, Any, Any]]:
        server.device.gate.clear()
        first = asyncio.create_task(post(client, prompt="x", max_tokens=1))
        while not server.device.entered.is_set():
            await asyncio.sleep(0.001)
        # These wait in the inbox until the step has ended.
        posts = [asyncio.create_task(post(client, prompt="y", max_tokens=2)) for _ in range(3)]
        while len(server.worker._inbox) < 3:
            await asyncio.sleep(0.001)
        operation = asyncio.create_task(server.worker.operate(lambda engine: engine))
        await asyncio.sleep(0)
        monkeypatch.setattr(server.worker.scheduler, "queue", fail)
        server.device.gate.set()
        assert (await first)[0] == 200
        answers = await asyncio.gather(*posts)
        with pytest.raises(NotServingError, match="a bug in a queue"):
            await operation
        return answers

    def fail(*_: object) -> None:
        raise ZeroDivisionError("a bug in a queue")

    with live() as server:
        answers = asyncio.run(asyncio.wait_for(with_client(server.url, scenario), 20))
        assert [status for status, _, _ in answers] == [500] * 3
        assert all("a bug in a queue" in answer["error"]["message"] for _, answer, _ in answers)


def test_an_operation_that_was_given_up_does_not_keep_the_others_from_their_answers() -> None:
    async def scenario(client: aiohttp.ClientSession) -> tuple[int, Any, Any]:
        server.device.gate.clear()
        waiting = asyncio.create_task(post(client, prompt="x", max_tokens=2))
        while not server.device.entered.is_set():
            await asyncio.sleep(0.001)
        operation = asyncio.create_task(server.worker.operate(lambda engine: engine))
        await asyncio.sleep(0)
        operation.cancel()
        for _ in range(5):  # until the engine's side of it is cancelled, too
            await asyncio.sleep(0)
        server.worker._leave_behind("the device hangs")
        return await waiting

    with live() as server:
        status, answer, _ = asyncio.run(asyncio.wait_for(with_client(server.url, scenario), 20))
        assert status == 500
        assert "the device hangs" in answer["error"]["message"]


def test_a_drain_finishes_what_runs_and_refuses_what_comes() -> None:
    async def scenario(client: aiohttp.ClientSession) -> tuple[str, Any, int]:
        body = {"prompt": "abc", "max_tokens": 50, "stream": True}
        async with client.post("/v1/completions", json=body) as response:
            text = await read_until_text(response)
            server.device.gate.clear()
            server.worker.begin_drain(20)
            refused = await post(client, prompt="late")
            status = await health(client)
            server.device.gate.set()
            text += await response.text()
        return text, refused, status

    with live() as server:
        text, (status, answer, _), told = asyncio.run(with_client(server.url, scenario))
        assert (status, answer["error"]["code"], told) == (503, "not_serving", 503)
        assert "shutting down" in answer["error"]["message"]
        assert len(parse_events(text)) == 50
        assert reasons(server) == [EndReason.LENGTH]
        assert server.worker.wait_stopped(5)


def test_a_drain_that_takes_too_long_aborts_the_rest_once() -> None:
    async def scenario(client: aiohttp.ClientSession) -> tuple[str, Any]:
        body = {"prompt": "abc", "max_tokens": 400, "stream": True}
        async with client.post("/v1/completions", json=body) as response:
            text = await read_until_text(response)
            server.device.gate.clear()
            server.device.entered.clear()
            waiting = asyncio.create_task(post(client, prompt="queued", max_tokens=300))
            while server.worker.scheduler.num_unfinished < 2:
                server.device.gate.set()
                await asyncio.sleep(0)
            server.device.gate.clear()
            server.worker.begin_drain(0)
            server.device.gate.set()
            return text + await response.text(), await waiting

    with live(limits=Limits(max_num_seqs=1)) as server:
        text, (status, answer, _) = asyncio.run(with_client(server.url, scenario))
        assert parse_events(text)[-1]["error"]["code"] == "shutdown"
        assert (status, answer["error"]["code"]) == (503, "shutdown")
        assert sorted(r.status for r in server.worker.records) == [RequestStatus.ABORTED] * 2
        assert reasons(server) == [EndReason.SHUTDOWN] * 2
        assert server.num_held_blocks == 0


SERVER_PROGRAM = """
from slosched.engine.emulated import EmulatedExecutor
from slosched.engine.loop import Engine, MonotonicClock
from slosched.engine.server import ByteTokenizer, EngineWorker, ServerConfig, build_app, serve
from slosched.kv import KVCache
from slosched.perfmodel import LinearCoefficients, LinearModel
from slosched.kv import PrefixCaching
from slosched.policy import FCFS
from slosched.scheduler import Scheduler
model = LinearModel(LinearCoefficients(0, 0, 0, 0, 0, 0, 0.01))
worker = EngineWorker(
    Engine(Scheduler(FCFS(), KVCache(64)), EmulatedExecutor(model), MonotonicClock())
)
app = build_app(worker, ByteTokenizer(), ServerConfig("m", 512))
num_cut_short = serve(app, worker, port=0, on_ready=lambda url: print(url, flush=True))
worker.scheduler.kv.check()
ends = [str(r.end_reason) for r in worker.records]
print(ends, worker.scheduler.kv.used_fraction, num_cut_short, flush=True)
"""


async def health(client: aiohttp.ClientSession) -> int:
    async with client.get("/health") as response:
        return response.status


@pytest.mark.e2e
@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_the_process(sig: signal.Signals) -> None:
    with server_process(SERVER_PROGRAM) as (process, url):

        async def scenario(client: aiohttp.ClientSession) -> str:
            body = {"prompt": "abc", "max_tokens": 60, "stream": True}
            async with client.post("/v1/completions", json=body) as response:
                text = await read_until_text(response)
                process.send_signal(sig)
                return text + await response.text()

        text = asyncio.run(with_client(url, scenario))
        assert len(parse_events(text)) == 60, "it was allowed to finish"
        out, err = process.communicate(timeout=20)
        assert (process.returncode, err) == (0, "")
        assert out.strip() == "['length'] 0.0 0"


@pytest.mark.e2e
def test_a_second_signal_answers_at_once_and_says_how_many_were_cut_short() -> None:
    with server_process(SERVER_PROGRAM) as (process, url):

        async def scenario(client: aiohttp.ClientSession) -> tuple[str, Any]:
            whole = asyncio.create_task(post(client, prompt="abc", max_tokens=500))
            body = {"prompt": "abc", "max_tokens": 500, "stream": True}
            async with client.post("/v1/completions", json=body) as response:
                text = await read_until_text(response)
                process.send_signal(signal.SIGINT)
                while await health(client) == 200:  # two signals at once would count as one
                    await asyncio.sleep(0.01)
                process.send_signal(signal.SIGINT)
                return text + await response.text(), await whole

        text, (status, answer, _) = asyncio.run(with_client(url, scenario))
        assert parse_events(text)[-1]["error"]["code"] == "shutdown"
        assert (status, answer["error"]["code"]) == (503, "shutdown")
        out, err = process.communicate(timeout=20)
        assert (process.returncode, err) == (0, "")
        assert out.strip() == "['shutdown', 'shutdown'] 0.0 2"


def test_a_port_in_use_is_a_clear_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ServerStartError, match=str(port)):
            listen("127.0.0.1", port)
    with pytest.raises(ServerStartError, match="99999"):
        listen("127.0.0.1", 99999)


def test_slo_aware_serves_over_http() -> None:
    with live(SLOAware()) as server:
        for _ in range(3):
            status, answer, _ = server.post(
                prompt="hello", max_tokens=5, slo_ttft_ms=5000, slo_tpot_ms=500
            )
            assert (status, answer["choices"][0]["text"]) == (200, "hello")


@pytest.mark.parametrize("caching", [PrefixCaching.OFF, PrefixCaching.HASH])
@pytest.mark.parametrize("spec", ["goodput+door", "edf+door", "fcfs+door"])
@pytest.mark.parametrize("milliseconds", [1e300, 1e-300])
def test_a_promise_of_any_size_does_no_harm(
    spec: str, caching: PrefixCaching, milliseconds: float
) -> None:
    """With a prefix cache the door judges in the engine's thread, which an error would end."""
    with live(make_policy(spec), prefix_cache=caching) as server:
        for name in ("slo_ttft_ms", "slo_tpot_ms", "slo_e2e_ms"):
            status, _, _ = server.post(prompt="a prompt", max_tokens=2, **{name: milliseconds})
            assert status in (200, 429)
            assert status == 200 or milliseconds < 1
        assert server.post(prompt="another", max_tokens=2)[0] == 200
        assert server.worker.why_broken is None


def test_a_promise_that_is_over_before_the_client_can_see_a_token_is_refused() -> None:
    """The server's own time for a request is a part of the client's TTFT."""
    body = {"prompt": "hello", "max_tokens": 2}
    drops = make_policy("edf:drop=expired")
    with live(drops, default_slo=SLO(0.9, 1.0), per_request_s=1.0) as server:
        status, answer, _ = server.post(**body)
        assert (status, answer["error"]["reason"]) == (429, "expired")
        [record] = server.worker.records
        assert record.end_reason is EndReason.EXPIRED
    with live(default_slo=SLO(1.5, 1.0), per_request_s=1.0) as server:
        events = server.events(**body, stream=True, stream_options={"include_usage": True})
        assert events[-1]["metrics"]["time_to_first_token_ms"] >= 1000
