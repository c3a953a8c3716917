"""`slosched serve --ray`: real servers on a Ray cluster of this machine."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from command_line import SLOSCHED, Said, Server, serving

from slosched.cli.ray_serve import replica_arguments, state_key

GPU = "l40s/llama-3.1-8b"
_PATIENCE_S = 120.0


@pytest.fixture(scope="module")
def front() -> Iterator[Server]:
    pytest.importorskip("ray.serve")
    with serving(
        "--ray", "local", "--replicas", "2", "--router", "predicted_ttft", "--emulate", GPU
    ) as server:
        yield server


def replica_processes(front: Server) -> list[psutil.Process]:
    """Return the servers behind the front; the machine may have others."""
    found = []
    for process in psutil.Process(front.process.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            words = process.cmdline()
            if "serve" in words and "--emulate" in words and "--ray" not in words:
                found.append(process)
    return found


def url_of(process: psutil.Process) -> str:
    words = process.cmdline()
    return f"http://{words[words.index('--host') + 1]}:{words[words.index('--port') + 1]}"


def served(process: psutil.Process) -> float:
    """Return the requests that a server has ended."""
    page = Server(None, url_of(process), "", None).get("/metrics")[1]  # type: ignore[arg-type]
    counts = re.findall(r"^vllm:request_success_total\{[^}]*\} (\S+)$", page, flags=re.MULTILINE)
    return sum(map(float, counts))


def wait_until(is_so: Callable[[], bool]) -> None:
    give_up_s = time.monotonic() + _PATIENCE_S
    while not is_so():
        assert time.monotonic() < give_up_s, "waited in vain"
        time.sleep(0.2)


def ask(front: Server, number: int) -> tuple[int, int]:
    """Return the status of one stream, and the number of its events."""
    body = {"prompt": f"{number} times", "max_tokens": 10, "ignore_eos": True, "stream": True}
    status, text = front.post_raw(json.dumps(body).encode())
    return status, text.count("data: ")


@pytest.mark.slow
def test_each_server_tells_its_address(front: Server) -> None:
    """Ray by itself shows one of several lines that differ in numbers only."""
    urls = {url_of(each) for each in replica_processes(front)}
    assert len(urls) == 2
    wait_until(lambda: all(f" at {url} " in front.output.read_text() for url in urls))


@pytest.mark.slow
def test_requests_are_spread_over_the_replicas(front: Server) -> None:
    assert front.get("/v1/models")[0] == 200
    with ThreadPoolExecutor(8) as clients:
        answers = [*clients.map(lambda number: ask(front, number), range(32))]
    assert answers == [(200, 11)] * 32
    counts = [served(each) for each in replica_processes(front)]
    assert len(counts) == 2
    assert min(counts) >= 5
    assert sum(counts) == 32


@pytest.mark.slow
def test_the_errors_of_a_replica_are_passed_on(front: Server) -> None:
    status, answer = front.post(prompt="hello", max_tokens="many")
    assert status == 400
    assert "max_tokens" in answer["error"]["message"]
    status, answer = front.post(model="another", prompt="hello")
    assert status == 404
    assert front.post_raw(b"{no JSON")[0] == 400


@pytest.mark.slow
def test_a_server_that_dies_is_replaced_and_its_requests_go_elsewhere(front: Server) -> None:
    dead, alive = replica_processes(front)
    dead.send_signal(signal.SIGKILL)
    assert [ask(front, number) for number in range(6)] == [(200, 11)] * 6
    wait_until(
        lambda: len({url_of(each) for each in replica_processes(front)} - {url_of(alive)}) == 1
    )


@pytest.mark.slow
def test_sigterm_ends_all_of_it(front: Server) -> None:
    servers = replica_processes(front)
    assert len(servers) == 2
    status, _ = front.terminate()
    assert status == 0
    wait_until(lambda: not any(each.is_running() for each in servers))


@pytest.mark.slow
def test_sigterm_does_not_wait_for_servers_that_still_start(tmp_path: Path) -> None:
    pytest.importorskip("ray.serve")
    words = ("serve", "--ray", "local", "--port", "0", "--model", "tiny-random", "--recalibrate")
    output = tmp_path / "output.txt"
    with (
        output.open("ab") as written,
        subprocess.Popen([SLOSCHED, *words], stdout=written, stderr=written) as process,
    ):
        wait_until(lambda: "profiling tiny-random" in output.read_text())
        process.terminate()
        assert process.wait(_PATIENCE_S) != 0
    assert "latency model: wrong by" not in output.read_text(), "it waited for the measurement"


@pytest.mark.slow
def test_what_is_not_finished_when_the_drain_ends_gets_an_error() -> None:
    pytest.importorskip("ray.serve")
    long = {"prompt": "hello", "max_tokens": 5000, "ignore_eos": True}
    with (
        serving("--ray", "local", "--drain-timeout", "1s", "--emulate", GPU) as front,
        ThreadPoolExecutor(2) as clients,
    ):
        whole = clients.submit(front.post_raw, json.dumps(long).encode())
        stream = clients.submit(front.post_raw, json.dumps(long | {"stream": True}).encode())
        wait_until(lambda: '"num_requests_running":2' in front.get("/load")[1])
        front.terminate()
    assert whole.result()[0] in (502, 503)
    assert "error" in json.loads(whole.result()[1])
    assert '"code": "shutdown"' in stream.result()[1]
    assert stream.result()[1].endswith("data: [DONE]\n\n")


def test_each_server_gets_the_options_that_are_not_for_ray() -> None:
    command = "slosched serve --ray auto --replicas=4 --port 80 --host=:: -p fcfs Qwen/Qwen3-8B"
    assert replica_arguments(command.split()) == ["-p", "fcfs", "Qwen/Qwen3-8B"]


def test_a_port_in_use_is_an_error_before_a_cluster_starts(cli: Callable[..., Said]) -> None:
    pytest.importorskip("ray.serve")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        said = cli("serve", "--ray", "local", "--emulate", GPU, "--port", port)
    assert said.status == 1
    assert said.complaint == (
        f"error: cannot listen on 127.0.0.1:{port}: Address already in use; "
        "choose another --host or --port"
    )


def test_servers_are_asked_for_their_state_with_a_key_that_they_know() -> None:
    assert state_key((), {}) is None
    assert state_key(("first", "second"), {"acme's": "acme"}) == "first"
    assert state_key((), {"acme's": "acme", "other's": "other"}) == "acme's"


@pytest.mark.parametrize("option", ["--replicas", "--router", "--gpus-per-replica"])
def test_an_option_for_ray_alone_is_an_error(cli: Callable[..., Said], option: str) -> None:
    """One server would start, whatever the option says."""
    value = "round_robin" if option == "--router" else "2"
    said = cli("serve", "--emulate", GPU, "--port", "0", option, value)
    assert said.status == 1
    assert said.complaint.startswith(f"error: {option} is for --ray")
