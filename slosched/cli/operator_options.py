"""The options for whoever operates a server: its own endpoints, profiles and log lines."""

from __future__ import annotations

import logging
import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slosched.cli import options
from slosched.cli.console import console
from slosched.engine.log_lines import LogFormat

if TYPE_CHECKING:
    from slosched.cli.local_model import LocalModel
    from slosched.core import DeadlineRule
    from slosched.engine.background import InBackground
    from slosched.engine.server import Reporter
    from slosched.engine.torch import TorchControl

log = logging.getLogger(__name__)


def _interval(text: str) -> float:
    """Return seconds; infinity for "off" and "0"."""
    return math.inf if str(text).strip() in ("off", "0") else options.duration(text)


@dataclass(frozen=True)
class OperatorOptions:
    """The options for the operator of a server."""

    admin_api_key: Annotated[
        str | None,
        typer.Option(
            metavar="KEY",
            envvar="SLOSCHED_ADMIN_API_KEY",
            help="Offer the operator's endpoints to whoever has this key: POST /abort, "
            "/reset_prefix_cache, /update_weights_from_disk, /start_profile, /stop_profile.",
        ),
    ] = None
    torch_profiler_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            file_okay=False,
            callback=options.writable,
            help="Where /stop_profile writes torch's profile; needs --admin-api-key.",
        ),
    ] = None
    log_interval: Annotated[
        float,
        typer.Option(
            parser=_interval,
            metavar="TIME|off",
            help="How often a line on prefill and decode is printed while there is work: 10s.",
        ),
    ] = options.Seconds(10)
    log_format: Annotated[
        LogFormat, typer.Option(help="Form of log lines: text, or one JSON object a line.")
    ] = LogFormat.TEXT
    log_requests: Annotated[
        bool,
        typer.Option(
            help="Log a line for each request when it has ended: tokens, TTFT, TPOT, whether its "
            "SLO was met, and why it ended; never its text."
        ),
    ] = True
    otlp_traces_endpoint: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            callback=options.collector_url,
            help="Send an OpenTelemetry span for each request to this collector: "
            "http://localhost:4317.  Needs the otel extra.",
        ),
    ] = None

    def check(self, *, is_emulated: bool) -> None:
        """Raise ValueError for options that would do nothing."""
        if self.torch_profiler_dir is not None and (is_emulated or self.admin_api_key is None):
            why = "an emulated device runs no model" if is_emulated else "it needs --admin-api-key"
            raise ValueError(f"--torch-profiler-dir records nothing: {why}")

    def say(self, text: str) -> None:
        """Print what the operator is to know, or log it where all output is to be JSON.

        It is also logged where nothing can be printed, as on a full disk, and then nothing more is
        printed.
        """
        if self.log_format is not LogFormat.JSON:
            try:
                console.print(text, markup=False)
            except OSError:  # what is still in Python's buffer must not fail the end, either
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            else:
                return
        log.info("%s", text)

    def reporters(self, rule: DeadlineRule) -> tuple[Reporter, ...]:
        """Return what is to be told of requests that have ended, besides the log."""
        from slosched.engine.server import Traces  # starlette and uvicorn are an extra

        endpoint = self.otlp_traces_endpoint
        return () if endpoint is None else (Traces(endpoint, rule),)

    def control(self, local: LocalModel, background: InBackground | None) -> TorchControl:
        """Return the operations on a model, whose steps run in `background` if there is one."""
        from slosched.engine.torch import TorchControl  # takes seconds

        if background is None:
            return TorchControl(local.loaded, self.torch_profiler_dir)
        return TorchControl(local.loaded, self.torch_profiler_dir, background.call)
