"""Run the server until a signal arrives, and leave no request without an answer."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import socket
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Protocol

import anyio
import uvicorn
from starlette.types import ASGIApp

from slosched.core import SloschedError
from slosched.engine.server.accepting import FromBothEnds
from slosched.engine.server.clients import Clients, ConnectionLimits
from slosched.engine.server.connection import Connection, raise_descriptor_limit
from slosched.engine.server.event_loop import TimedLoop
from slosched.engine.server.log_limit import limit_log_lines
from slosched.engine.server.probes import Probes
from slosched.engine.server.throughput_log import ThroughputLog
from slosched.engine.server.tls import TLSFiles
from slosched.engine.server.worker import EngineWorker

log = logging.getLogger(__name__)

_BACKLOG = 65_535
"""Connections that the kernel keeps until they are accepted; it lowers the number to its own limit.
Those beyond it come again after a second."""
_LAST_BYTES_S = 5
"""Seconds after the drain in which complete answers may still reach their clients."""


_GIL_SWITCH_S = 0.0005
"""The interpreter's switch interval: how long the HTTP thread may keep the GIL from the engine's
thread.  Python's default is ten times longer, which is half a step of a fast device."""


_LIMITS = ConnectionLimits()


class ServerStartError(SloschedError):
    """The server cannot listen on the given host and port."""


class ServerStoppedError(SloschedError):
    """The engine failed for good.  Every request was answered, and no further one can be served."""


class Drains(Protocol):
    """What answers the requests of a server, and can come to an end."""

    @property
    def has_stopped(self) -> bool:
        """Tell whether no request will be answered any more."""

    def begin_drain(self, timeout_s: float) -> None:
        """Take no new requests; cut short those that are not finished after `timeout_s`.

        A second call may shorten the time.
        """

    def give_up_hung_drain(self, grace_s: float) -> None:
        """Stop waiting for a device that still hangs `grace_s` after the end of the drain."""


class DrainingServer(uvicorn.Server):
    """A uvicorn server that drains before it closes its sockets, so that refusals are clear 503s.

    uvicorn alone closes the sockets at once and then waits.  A second signal cuts the drain short:
    running requests are answered with an error.  A third does not wait for those answers, either.
    """

    def __init__(
        self, config: uvicorn.Config, worker: Drains, drain_timeout_s: float, clients: Clients
    ) -> None:
        super().__init__(config)
        self._clients = clients
        self._worker = worker
        self._drain_timeout_s = drain_timeout_s
        self.drain_requested = False
        self._accepting: list[FromBothEnds] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        protocol_class: Callable[..., asyncio.Protocol] = self.config.http_protocol_class
        state, app_state = self.server_state, self.lifespan.state
        new = partial(protocol_class, config=self.config, server_state=state, app_state=app_state)
        tls = self.config.ssl
        probes = Probes(self.config.loaded_app, lambda: state.default_headers)
        self._accepting = [
            FromBothEnds(each, new, tls, self._clients, probes) for each in sockets or ()
        ]

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for accepting in self._accepting:
            accepting.close()
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002  # uvicorn's
        """Only set flags, since a signal may come while this thread holds the worker's lock."""
        self.force_exit = self.should_exit
        self.should_exit |= self.drain_requested
        self.drain_requested = True

    async def on_tick(self, counter: int) -> bool:
        if self.drain_requested:
            self._worker.begin_drain(0.0 if self.should_exit else self._drain_timeout_s)
            self._worker.give_up_hung_drain(_LAST_BYTES_S)
        if self._worker.has_stopped:
            self.should_exit = True
        return await super().on_tick(counter)


def serve(
    app: ASGIApp,
    worker: EngineWorker,
    host: str = "127.0.0.1",
    port: int = 8000,
    *,
    drain_timeout_s: float = 30.0,
    log_interval_s: float = math.inf,
    tls: TLSFiles | None = None,
    log_level: str = "warning",
    on_ready: Callable[[str], None] | None = None,
) -> int:
    """Serve until SIGINT or SIGTERM, then drain: running requests finish, new ones get a 503.

    Requests that are not finished after `drain_timeout_s` are aborted with an error; a second
    signal aborts them at once.  Returns the number of requests that were cut short in this way.

    Every `log_interval_s` a line on prefill and decode is logged, if there was any.
    With `tls` it speaks HTTPS.  `log_level` is uvicorn's: critical, error, warning, info, debug or
    trace.

    `on_ready` is called with the base URL once the server listens; port 0 chooses a free port.
    Raises ServerStartError if it cannot listen there, ServerStoppedError if the engine fails for
    good: after too many failed steps in a row, after a bug of the policy, or if it hangs in a step
    when a drain is to end.
    """
    listener, url = listen(host, port, tls)
    limits = ConnectionLimits(max_connections=raise_descriptor_limit())
    server = make_server(app, worker, drain_timeout_s, limits, tls, log_level)
    limit_log_lines()
    sys.setswitchinterval(_GIL_SWITCH_S)
    worker.start()
    ThroughputLog(worker).start(log_interval_s)
    try:
        with start_up_frozen():
            run_loop(run_server(server, listener, lambda: on_ready(url) if on_ready else None))
    finally:
        _stop(worker)
    if worker.why_broken is not None:
        raise ServerStoppedError(f"the engine failed for good: {worker.why_broken}")
    return worker.num_cut_short


@contextmanager
def serve_in_thread(
    app: ASGIApp,
    worker: EngineWorker,
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    drain_timeout_s: float = 5.0,
    limits: ConnectionLimits = _LIMITS,
    tls: TLSFiles | None = None,
) -> Iterator[str]:
    """Yield the base URL of a server in a thread of this process; drain the server at the end."""
    listener, url = listen(host, port, tls)
    server = make_server(app, worker, drain_timeout_s, limits, tls)
    ready = threading.Event()
    thread = threading.Thread(
        target=lambda: run_loop(run_server(server, listener, ready.set)), name="slosched-http"
    )
    worker.start()
    thread.start()
    try:
        ready.wait()
        yield url
    finally:
        server.drain_requested = True
        thread.join()
        _stop(worker)


@contextmanager
def start_up_frozen() -> Iterator[None]:
    """Spare the garbage collector, until the end, all objects that are there at the beginning.

    With torch they are 400,000.  A full collection goes through all of them, for a quarter of a
    second, and no thread answers or decodes meanwhile.  At the end they are given back, since
    libraries complain of what is never collected before the process ends.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def run_loop(main: Coroutine[None, None, None]) -> None:
    """Run a server in an event loop that measures its turns."""
    asyncio.run(_use_anyio())
    with asyncio.Runner(loop_factory=TimedLoop) as runner:
        runner.run(main)


async def _use_anyio() -> None:
    """Use anyio once, as Starlette's streams do, so that it has imported most of itself.

    The first stream, and everybody beside it, would wait for a tenth of a second otherwise.
    """
    async with anyio.create_task_group():
        pass


async def run_server(
    server: DrainingServer, listener: socket.socket, on_ready: Callable[[], None]
) -> None:
    """Serve until the server has drained; `on_ready` is called once it accepts connections."""
    # The kernel queues connections as soon as `listen` returns; uvicorn accepts them a moment
    # later.
    asyncio.get_running_loop().call_soon(on_ready)
    await server.serve(sockets=[listener])


def make_server(
    app: ASGIApp,
    worker: Drains,
    drain_timeout_s: float,
    limits: ConnectionLimits,
    tls: TLSFiles | None,
    log_level: str = "warning",
) -> DrainingServer:
    """Return a server with limits on its connections; `run_server` runs it."""
    clients = Clients(limits)
    config = uvicorn.Config(
        app,
        http=partial(Connection, clients=clients),  # type: ignore[arg-type]  # only called
        ws="none",
        backlog=_BACKLOG,
        log_level=log_level,
        log_config=None,  # its lines go where those of slosched go
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=_LAST_BYTES_S,
        ssl_certfile=None if tls is None else tls.certfile,
        ssl_keyfile=None if tls is None else tls.keyfile,
    )
    config.load()  # its imports take a tenth of a second, which no turn of the loop should
    return DrainingServer(config, worker, drain_timeout_s, clients)


def check_can_listen(host: str, port: int) -> None:
    """Raise ServerStartError if the server could not listen there, before a model is loaded."""
    listen(host, port)[0].close()


def listen(host: str, port: int, tls: TLSFiles | None = None) -> tuple[socket.socket, str]:
    """Return a listening socket and its base URL; raise ServerStartError if there is none."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    if not 0 <= port < 65536:
        raise ServerStartError(f"a port is a number in [0, 65536), not {port}")
    try:
        listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        reason = str(error.strerror or error).partition(" (while")[0]
        raise ServerStartError(
            f"cannot listen on {host}:{port}: {reason}; choose another --host or --port"
        ) from error
    shown = f"[{host}]" if family == socket.AF_INET6 else host
    scheme = "http" if tls is None else "https"
    return listener, f"{scheme}://{shown}:{listener.getsockname()[1]}"


def _stop(worker: EngineWorker) -> None:
    """Cut short what still runs after the sockets are closed (after a second signal or a crash)."""
    worker.begin_drain(0.0)
    if not worker.wait_stopped(_LAST_BYTES_S):
        log.error("the engine thread is still in a step after %d s; leaving it", _LAST_BYTES_S)
