"""`slosched serve --ray`: several servers on a Ray cluster, behind one address."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated

import typer

from slosched.cli import options
from slosched.cli.console import console
from slosched.cli.local_model import ExtraMissingError
from slosched.cli.network_options import NetworkOptions
from slosched.fleet.routers import ROUTERS
from slosched.fleet.spec import make_router
from slosched.integrations.ray import LOCAL, connect

_OWN = ("--ray", "--replicas", "--router", "--gpus-per-replica", "--host", "--port")
"""Options that are not those of a replica's own server; each takes a value."""
_KEYS = ("SLOSCHED_API_KEY", "SLOSCHED_ADMIN_API_KEY")
"""Variables that are options of `serve`."""


@dataclass(frozen=True)
class RayOptions:
    """Where servers run, how many there are, and who sends requests to them."""

    ray: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Serve with Ray Serve (extra `ray`): `local` starts a cluster on this machine, "
            "`auto` or `host:port` uses one that runs.",
        ),
    ] = None
    replicas: Annotated[int, typer.Option(min=1, help="With --ray: the number of servers.")] = 1
    router: Annotated[
        str,
        typer.Option(
            metavar="NAME[:option=value,…]",
            help=f"With --ray: what chooses the server of a request: {', '.join(ROUTERS)}.",
        ),
    ] = "least_requests"
    gpus_per_replica: Annotated[
        float, typer.Option(min=0, help="With --ray: GPUs that Ray reserves for each server.")
    ] = 0.0

    def check_unused(self, context: typer.Context) -> None:
        """Raise ValueError if an option for Ray was given without --ray."""
        given = [each.name for each in fields(self) if options.is_given(context, each.name)]
        if given:
            raise ValueError(
                f"--{given[0].replace('_', '-')} is for --ray, which starts several servers "
                "(--ray local: on this machine); without it leave the option out"
            )

    def serve(self, network: NetworkOptions, key: str | None, drain_timeout_s: float) -> None:
        """Serve until SIGINT or SIGTERM arrives; each server gets this command's other options.

        With the key the servers are asked for their state.

        Raises ExtraMissingError without Ray, and ValueError for options that Ray Serve has not.
        """
        make_router(self.router)
        if network.ssl_certfile is not None or network.ssl_keyfile is not None:
            raise ValueError("Ray Serve answers in HTTP; put HTTPS in front of it, not --ssl-…")
        # Ray shows only one of several lines that differ in numbers, such as addresses.
        os.environ.setdefault("RAY_DEDUP_LOGS", "0")
        try:
            from slosched.engine.server import check_can_listen
            from slosched.gateway.ray_serve.deploy import Application, serve_application
        except ImportError as error:
            raise ExtraMissingError(
                f"--ray needs Ray Serve ({error}): pip install 'slosched[ray,serve]'"
            ) from error
        application = Application(
            replica_arguments(sys.argv),
            replica_environment(os.environ),
            self.replicas,
            self.router,
            self.gpus_per_replica,
            key,
            drain_timeout_s,
        )

        def announce(url: str) -> None:
            console.print(
                f"serving at {url} with {self.replicas} replicas, routed by {self.router}; "
                "Ctrl-C drains and stops",
                markup=False,
            )

        address = self.ray or LOCAL
        is_new = address == LOCAL
        if is_new:
            check_can_listen(network.host, network.port)
        connect(address)
        serve_application(application, network.host, network.port, announce, is_new=is_new)


def state_key(api_keys: Collection[str], tenants: Collection[str]) -> str | None:
    """Return a key that the servers know, of a tenant if there is no other; None without keys."""
    return next(iter((*api_keys, *tenants)), None)


def replica_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that are options of a replica's server."""
    return {name: value for name, value in environment.items() if name in _KEYS}


def replica_arguments(command: Sequence[str]) -> list[str]:
    """Return the arguments after `serve` in a command, without those that are for Ray."""
    left = list(command[command.index("serve") + 1 :])
    kept: list[str] = []
    while left:
        word = left.pop(0)
        name, _, value = word.partition("=")
        if name not in _OWN:
            kept.append(word)
        elif not value:
            left.pop(0)
    return kept
