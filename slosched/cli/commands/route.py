"""`slosched route`: one OpenAI-compatible address in front of several servers."""

from __future__ import annotations

from typing import Annotated

import typer

from slosched.cli import options
from slosched.cli.console import console
from slosched.cli.local_model import ExtraMissingError
from slosched.cli.network_options import NetworkOptions
from slosched.cli.option_groups import grouped
from slosched.cli.sigterm import stopped_aloud
from slosched.fleet.routers import ROUTERS


@grouped
@stopped_aloud()
def route(
    url: Annotated[
        list[str],
        typer.Option(metavar="URL", help="A replica: http://10.0.0.1:8000.  Once for each."),
    ],
    router: Annotated[
        str,
        typer.Option(
            metavar="NAME[:option=value,…]",
            help=f"What chooses the replica of a request: {', '.join(ROUTERS)}.",
        ),
    ] = "least_requests",
    network: NetworkOptions = NetworkOptions(port=8080),
    api_key: Annotated[
        str | None,
        typer.Option(
            metavar="KEY",
            envvar="SLOSCHED_API_KEY",
            callback=options.first_key,
            help="The key with which the router itself asks replicas for quotes.  Clients send "
            "their own keys, which are passed on.",
        ),
    ] = None,
    poll_interval: Annotated[
        float,
        typer.Option(
            parser=options.duration,
            metavar="TIME",
            help="How often each replica is asked for its state: 100ms.",
        ),
    ] = options.Seconds(0.1),
    connect_timeout: Annotated[
        float,
        typer.Option(
            parser=options.duration,
            metavar="TIME",
            help="How long a replica may take to accept a connection before the request goes to "
            "another one: 3s.",
        ),
    ] = options.Seconds(3),
    drain_timeout: Annotated[
        float,
        typer.Option(
            parser=options.duration,
            metavar="TIME",
            help="How long a shutdown waits for running requests: 10s.",
        ),
    ] = options.Seconds(30),
) -> None:
    """Route requests to several servers: one address, one of eight routers, failover.

    The replicas are `slosched serve`, vLLM, or any other OpenAI-compatible servers.  The routers
    are those of `slosched replay --replicas`.  `predicted_ttft`, `slo_bins` and `cheapest_in_time`
    need quotes, which `slosched serve` and vLLM with slosched's scheduler give; the others work
    with every server.

    Streams are passed on as they come.  When a client goes away, its replica aborts the request.
    As long as a client has seen nothing of its answer, its request goes to another replica if one
    does not connect, breaks off or answers 503, and after a 429 if another one is expected to be in
    time.  If the quotes of all replicas say that a request would be late, it gets its 429 at once.

    Examples:

    - two servers, the one with fewer requests first: `slosched route --url http://127.0.0.1:8000
      --url http://127.0.0.1:8001`
    - where the first token is expected first: `slosched route --url http://a:8000 --url
      http://b:8000 --router predicted_ttft --host 0.0.0.0 --port 80`
    - prompts that share prefixes, in front of vLLM: `slosched route --url http://a:8000 --url
      http://b:8000 --router prefix_affine`
    """
    try:
        from slosched.engine import server as http  # starlette, uvicorn and aiohttp are an extra
        from slosched.gateway import Gateway, GatewayConfig, serve_gateway
    except ImportError as error:
        raise ExtraMissingError(
            f"routing needs the serve extra ({error}): pip install 'slosched[serve]'"
        ) from error
    config = GatewayConfig(
        api_key=api_key,
        poll_interval_s=poll_interval,
        connect_timeout_s=connect_timeout,
        request_timeout_s=network.request_timeout,
        max_requests=network.max_concurrent_requests,
        allowed_origins=network.origins(),
        root_path=network.root_path,
    )
    gateway = Gateway(url, router, config)
    tls = network.tls()
    http.check_can_listen(network.host, network.port)

    def announce(address: str) -> None:
        for each in gateway.fleet.replicas:
            console.print(f"{each}: {'up' if each.is_up else each.why_down}", markup=False)
        console.print(f"routing at {address} by {router}; Ctrl-C drains and stops")

    num_cut_short = serve_gateway(
        gateway,
        network.host,
        network.port,
        drain_timeout_s=drain_timeout,
        tls=tls,
        log_level=network.uvicorn_log_level,
        on_ready=announce,
    )
    console.print(
        f"stopped; requests that were cut short, each with an error message: {num_cut_short}"
        if num_cut_short
        else "stopped: every request has had its answer"
    )
