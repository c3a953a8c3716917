"""A pool of workers on a Ray cluster, with the interface of `concurrent.futures`."""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any

from slosched.core import SloschedError

LOCAL = "local"
"""The address that stands for a new cluster on this machine."""

_REACH_TIMEOUT_S = 10.0
"""How long the head of a cluster may take to accept a connection."""
_START_TIMEOUT_S = 120
"""How long a new cluster may take to start; Ray's own 30 s are too short for a busy machine."""

_started: set[str] = set()
"""The pools for which this Ray worker has called `initialize`."""


class RayError(SloschedError):
    """Ray is not installed, or there is no cluster at the address."""


class RayPool(Executor):
    """Calls functions in the workers of a cluster; slosched must be installed on its machines.

    Each worker calls `initialize` before its first task, as in a `ProcessPoolExecutor`.  The data
    that it carries (a trace, a model) is sent to each machine once.
    """

    def __init__(self, address: str, initialize: Callable[[], None]) -> None:
        """Connect to `local`, `auto`, `host:port` or `ray://host:port`; may raise RayError."""
        self._ray = ray = _import_ray()
        self._started_here = not ray.is_initialized()
        if self._started_here:
            connect(address, log_to_driver=False, configure_logging=False)
        # The list makes Ray pass on the reference instead of the object it refers to.
        self._initialize = [ray.put(initialize)]
        self._name = uuid.uuid4().hex
        self._call = ray.remote(_call)
        self._tasks: list[Any] = []
        self._is_shut_down = False

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        if self._is_shut_down:
            raise RuntimeError("the pool is shut down and takes no more tasks")
        task = self._call.remote(self._name, self._initialize, fn, args, kwargs)
        self._tasks.append(task)
        future: Future[Any] = Future()
        task.future().add_done_callback(partial(_hand_on, future))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Leave the cluster, and stop it if this pool started it."""
        if self._is_shut_down:
            return
        self._is_shut_down = True
        if cancel_futures:
            for task in self._tasks:
                self._ray.cancel(task)
        elif wait and self._tasks:
            self._ray.wait(self._tasks, num_returns=len(self._tasks))
        self._tasks.clear()
        if self._started_here:
            self._ray.shutdown()


def ray_pool(address: str) -> Callable[[Callable[[], None]], Executor]:
    """Return a function that makes pools on the cluster at `address`.

    Raises RayError at once if Ray is not installed.
    """
    _import_ray()
    return lambda initialize: RayPool(address, initialize)


def connect(address: str, **options: Any) -> None:
    """Connect this process to a cluster, with options of `ray.init`; raise RayError if none is."""
    if address == LOCAL:
        options["include_dashboard"] = False
        os.environ.setdefault("RAY_raylet_start_wait_time_s", str(_START_TIMEOUT_S))
    try:
        _check_reachable(address)
        _import_ray().init(address=address, **options)
    except (ConnectionError, OSError, OverflowError, RuntimeError, ValueError) as error:
        raise RayError(
            f"no Ray cluster at {address!r} ({error}); start one with `ray start --head`, or "
            f"use {LOCAL!r} for one on this machine"
        ) from error


def _check_reachable(address: str) -> None:
    """Raise OSError if nobody listens at `host:port`, where Ray would go on trying for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), _REACH_TIMEOUT_S).close()


def _call(
    name: str,
    initialize: list[Any],
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Run a task in a worker; initialize the worker first if this pool has not done so."""
    if name not in _started:
        _import_ray().get(initialize[0])()
        _started.clear()  # this initialization has replaced what other pools set up
        _started.add(name)
    return fn(*args, **kwargs)


def _hand_on(future: Future[Any], done: Future[Any]) -> None:
    """Set the result, or the original error instead of Ray's wrapper around it."""
    error = done.exception()
    if error is None:
        future.set_result(done.result())
    else:
        future.set_exception(getattr(error, "cause", None) or error)


def _import_ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise RayError(
            f"sweeps on a cluster need the ray extra ({error}): pip install 'slosched[ray]'"
        ) from error
    return ray
