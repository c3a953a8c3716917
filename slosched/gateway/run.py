"""Run a gateway until a signal arrives, and leave no request without an answer."""

from __future__ import annotations

import socket
from collections.abc import Callable

from slosched.engine.server.clients import ConnectionLimits
from slosched.engine.server.connection import raise_descriptor_limit
from slosched.engine.server.log_limit import limit_log_lines
from slosched.engine.server.run import (
    DrainingServer,
    listen,
    make_server,
    run_loop,
    run_server,
    start_up_frozen,
)
from slosched.engine.server.tls import TLSFiles
from slosched.gateway.gateway import Gateway


def serve_gateway(
    gateway: Gateway,
    host: str = "127.0.0.1",
    port: int = 8080,
    *,
    drain_timeout_s: float = 30.0,
    tls: TLSFiles | None = None,
    log_level: str = "warning",
    on_ready: Callable[[str], None] | None = None,
) -> int:
    """Serve until SIGINT or SIGTERM, then drain as `slosched.engine.server.serve` does.

    Returns the number of requests that were cut short.  `on_ready` is called with the base URL
    once every replica has been asked; port 0 chooses a free port.

    Raises ServerStartError if it cannot listen there, and RouterNeedsError if a replica does not
    tell what the router needs.
    """
    listener, url = listen(host, port, tls)
    limits = ConnectionLimits(max_connections=raise_descriptor_limit())
    server = make_server(gateway.app, gateway.generate, drain_timeout_s, limits, tls, log_level)
    limit_log_lines()
    with listener, start_up_frozen():
        run_loop(_run(gateway, server, listener, lambda: on_ready(url) if on_ready else None))
    return gateway.generate.num_cut_short


async def _run(
    gateway: Gateway, server: DrainingServer, listener: socket.socket, on_ready: Callable[[], None]
) -> None:
    await gateway.start()
    try:
        await run_server(server, listener, on_ready)
    finally:
        await gateway.stop()
