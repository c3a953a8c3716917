"""Start a Ray Serve application of slosched servers, and serve until a signal arrives."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import ray
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.context import _get_global_client

from slosched.core import SloschedError
from slosched.gateway.ray_serve.front import Front
from slosched.gateway.ray_serve.replica import EngineReplica
from slosched.gateway.ray_serve.request_router import FleetRouter
from slosched.gateway.ray_serve.server_process import STOP_MARGIN_S, free_port

_NAME = "slosched"
_MOST_REQUESTS = 100_000
"""Requests that a replica takes at once.  The server's own policy decides what runs."""

_HEALTH_PERIOD_S = 2.0
"""How often Ray Serve looks whether a server runs; it is replaced when three looks have failed."""


class NotStartedError(SloschedError):
    """The servers of an application did not start."""


@dataclass(frozen=True)
class Application:
    """What to deploy."""

    arguments: Sequence[str]
    """Those of `slosched serve`, for each replica."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables for each replica; those of a cluster's machines are other ones than those here."""
    num_replicas: int = 1
    router: str = "least_requests"
    num_gpus: float = 0.0
    """GPUs that Ray reserves for each replica."""
    api_key: str | None = None
    """The key with which servers are asked for their state."""
    drain_timeout_s: float = 30.0
    """How long a replica that is stopped may take to finish its requests."""


def serve_application(
    application: Application,
    host: str,
    port: int,
    on_ready: Callable[[str], None],
    *,
    is_new: bool,
) -> None:
    """Deploy on the cluster that this process is connected to, until SIGINT or SIGTERM comes.

    `on_ready` is called with the base URL when all replicas are up; port 0 chooses a free port.
    Where Ray Serve runs already, it goes on listening at the host and port that it has.
    Raises NotStartedError if Ray Serve or the replicas do not start, or if the cluster has such an
    application already.
    On a cluster that was there before, the application is taken away again at the end; a new one
    is stopped, at once if the replicas are not up yet.
    """
    stopped = threading.Event()
    is_up = False
    try:
        # Ray's own handler of SIGTERM aborts the process.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        port = port or free_port(host)
        _start(host, port)
        _check_there_is_none()
        try:
            _run(application)
            is_up = True
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, lambda *_: stopped.set())
            on_ready(_address())
            stopped.wait()
            _drain(application.drain_timeout_s)
        finally:
            if is_up or not is_new:
                serve.delete(_NAME)  # waits for servers that still start
    finally:
        if is_up and is_new:
            serve.shutdown()
        ray.shutdown()


def _start(host: str, port: int) -> None:
    """Start Ray Serve if it does not run; raise NotStartedError if it cannot listen there."""
    try:
        serve.start(http_options={"host": host, "port": port})
    except RuntimeError as error:
        serve.shutdown()  # else it would try the same address again and again
        why = str(error).rstrip().splitlines()[-1]
        raise NotStartedError(
            f"Ray Serve did not start ({why}); choose another --host or --port"
        ) from error


def _check_there_is_none() -> None:
    """Raise NotStartedError if an application of slosched is there: this one would replace it.

    The command that has started it would later take this one away.
    """
    if _NAME in serve.status().applications:
        raise NotStartedError(
            "the cluster has the servers of another `slosched serve --ray` already: end that "
            "command first; `serve shutdown` ends what a killed one has left"
        )


def _run(application: Application) -> None:
    """Return when all replicas are up; raise NotStartedError if they do not start."""
    try:
        serve.run(_bound(application), name=_NAME, route_prefix="/")
    except RuntimeError as error:
        raise NotStartedError(
            f'the servers did not start; a line above that begins with "error:" says why ({error})'
        ) from error


def _drain(drain_timeout_s: float) -> None:
    """Stop all servers; return when they have ended, at the latest when they should have."""
    stopping = serve.get_deployment_handle("engine", _NAME).broadcast("stop")
    with suppress(TimeoutError):
        stopping.results(timeout_s=drain_timeout_s + 2 * STOP_MARGIN_S)


def _address() -> str:
    """Return the base URL at which Ray Serve listens."""
    return str(_get_global_client().root_url)


def _bound(application: Application) -> serve.Application:
    routing = RequestRouterConfig(
        request_router_class=FleetRouter,
        request_router_kwargs={"router": application.router, "api_key": application.api_key},
    )
    engine = serve.deployment(
        EngineReplica,
        name="engine",
        num_replicas=application.num_replicas,
        max_ongoing_requests=_MOST_REQUESTS,
        ray_actor_options={"num_gpus": application.num_gpus, "num_cpus": 0},
        health_check_period_s=_HEALTH_PERIOD_S,
        graceful_shutdown_timeout_s=application.drain_timeout_s,
        request_router_config=routing,
    )
    front = serve.deployment(
        Front,
        name="front",
        max_ongoing_requests=_MOST_REQUESTS,
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=application.drain_timeout_s,
    )
    replicas = engine.bind(
        list(application.arguments), dict(application.environment), application.drain_timeout_s
    )
    return front.bind(replicas, application.api_key)
