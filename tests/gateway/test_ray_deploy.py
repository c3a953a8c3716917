"""How an application of servers starts and ends on a Ray cluster of this machine."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator

import pytest

pytest.importorskip("ray", reason="Ray is not installed here: pip install 'slosched[ray]'")

import ray
from ray import serve

from slosched.gateway.ray_serve.deploy import Application, NotStartedError, serve_application
from slosched.gateway.ray_serve.server_process import free_port
from slosched.integrations.ray import LOCAL, connect

HOST = "127.0.0.1"
GPU = "l40s/llama-3.1-8b"

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # warnings from Ray itself


@pytest.fixture
def cluster() -> Iterator[None]:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    connect(LOCAL)
    yield
    ray.shutdown()
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("cluster")
def test_the_address_is_that_at_which_ray_serve_listens_already() -> None:
    first, second = free_port(HOST), free_port(HOST)
    serve.start(http_options={"host": HOST, "port": first})
    told: list[str] = []

    def stop(url: str) -> None:
        told.append(url)
        os.kill(os.getpid(), signal.SIGTERM)

    serve_application(Application(["--emulate", GPU]), HOST, second, stop, is_new=False)
    assert told == [f"http://{HOST}:{first}"]


@serve.deployment
class Another:
    """A server that somebody else has started."""

    def __call__(self) -> str:
        return "here"


@pytest.mark.usefixtures("cluster")
def test_servers_that_are_there_are_not_replaced() -> None:
    serve.start(http_options={"host": HOST, "port": free_port(HOST)})
    serve.run(Another.bind(), name="slosched", route_prefix="/")

    def stop(_url: str) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(NotStartedError, match="another `slosched serve --ray` already"):
        serve_application(Application(["--emulate", GPU]), HOST, 0, stop, is_new=False)


@pytest.mark.usefixtures("cluster")
def test_a_sigterm_during_the_start_ends_it_in_order() -> None:
    """Ray's own handler aborts the process."""
    timer = threading.Timer(2.0, os.kill, (os.getpid(), signal.SIGTERM))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        serve_application(Application(["--emulate", GPU]), HOST, 0, print, is_new=True)
    assert not timer.is_alive()
    assert not ray.is_initialized()


@pytest.mark.usefixtures("cluster")
def test_servers_that_do_not_start_are_an_error_of_one_line() -> None:
    application = Application(["--emulate", GPU, "-p", "no_such_policy"])
    with pytest.raises(NotStartedError, match='a line above that begins with "error:" says why'):
        serve_application(application, HOST, 0, print, is_new=True)
    assert not ray.is_initialized()


@pytest.mark.usefixtures("cluster")
def test_a_port_in_use_on_a_running_cluster_is_an_error_of_one_line() -> None:
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(NotStartedError, match=f"Failed to bind to address '{HOST}:{port}'"):
            serve_application(Application([]), HOST, port, print, is_new=False)
