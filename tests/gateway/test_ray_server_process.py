"""The server that a replica of a Ray Serve application starts."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import suppress

import pytest

from slosched.cli.ray_serve import replica_environment
from slosched.gateway.ray_serve.server_process import ServerProcess, free_port


def status_of(url: str, headers: dict[str, str]) -> int:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers)) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.e2e
def test_a_server_asks_for_the_key_of_the_environment_in_which_serve_was_called() -> None:
    """The machines of a cluster do not have the variable."""
    environment = replica_environment({"SLOSCHED_API_KEY": "secret", "HOME": "/nowhere"})
    assert environment == {"SLOSCHED_API_KEY": "secret"}
    server = ServerProcess(["--emulate", "l40s/llama-3.1-8b"], "127.0.0.1", environment)
    try:
        server.wait_until_ready()
        assert status_of(f"{server.url}/v1/models", {}) == 401
        assert status_of(f"{server.url}/v1/models", {"Authorization": "Bearer secret"}) == 200
    finally:
        server.stop(0.0)


def answers(url: str) -> bool:
    with suppress(OSError):
        return status_of(f"{url}/health", {}) == 200
    return False


@pytest.mark.e2e
def test_a_server_ends_with_the_process_that_started_it() -> None:
    """Ray kills replicas, and what a killed one leaves would keep its GPU."""
    program = (
        "from slosched.gateway.ray_serve.server_process import ServerProcess\n"
        "server = ServerProcess(['--emulate', 'l40s/llama-3.1-8b'], '127.0.0.1', {})\n"
        "server.wait_until_ready()\n"
        "print('URL', server.url, flush=True)\n"
        "input()\n"
    )
    command = [sys.executable, "-c", program]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as starter:
        assert starter.stdout is not None
        url = next(line.split()[1] for line in starter.stdout if line.startswith("URL "))
        assert answers(url)
        starter.kill()
    give_up_s = time.monotonic() + 30.0
    while answers(url):
        assert time.monotonic() < give_up_s, "the server still answers"
        time.sleep(0.1)


@pytest.mark.skipif(not socket.has_ipv6, reason="this Python has no IPv6")
def test_a_free_port_is_found_for_ipv6() -> None:
    """`serve --ray local --host :: --port 0` asks for one."""
    assert 0 < free_port("::") < 65536
