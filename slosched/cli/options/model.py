"""The options for the model and the device that it runs on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Annotated

import typer

_MEASURED_DTYPES = frozenset({"float32", "bfloat16", "float16"})
"""The types with which the torch engine may have been measured."""


class Format(StrEnum):
    """The source of a model's weights: its files (auto) or random numbers (dummy)."""

    AUTO = "auto"
    DUMMY = "dummy"


@dataclass(frozen=True)
class ModelOptions:
    """The options for the model and the device that it runs on."""

    model: Annotated[
        str,
        typer.Option(
            "--model",
            "-m",
            help="smollm2-135m (comes with slosched), tiny-random, a local directory, or a Hugging "
            "Face id.",
        ),
    ] = "smollm2-135m"
    device: Annotated[
        str, typer.Option(help="Device that runs the model: auto, cpu, cuda or cuda:1.")
    ] = "auto"
    dtype: Annotated[
        str,
        typer.Option(
            help="Type of the weights: float32, bfloat16, float16, or auto: that of the "
            "measurement which is used or continued, else the faster one."
        ),
    ] = "auto"
    load_format: Annotated[
        Format,
        typer.Option(help="auto loads the weights; dummy makes random ones of the same shapes."),
    ] = Format.AUTO
    attention: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Kernels that compute attention: cpp, sdpa, triton, flash-attn, …  "
            "auto takes the best that is there; `slosched doctor` lists all.",
        ),
    ] = "auto"
    graph_sizes: Annotated[
        str,
        typer.Option(
            metavar="auto|none|NUM,…",
            help="Numbers of decodes to which a step of decodes alone is padded, to be replayed as "
            "a CUDA graph: 1,2,4,8, or vllm:64 (vLLM's up to 64).  auto takes those of vLLM on a "
            "GPU whose --attention can be captured, else none.  A CPU pads to those given and "
            "captures nothing.",
        ),
    ] = "auto"
    threads: Annotated[
        int | None,
        typer.Option(min=1, help="CPU threads that torch uses: 2.  Default: torch's own choice."),
    ] = None

    def as_measured(self, facts: Mapping[str, str]) -> ModelOptions:
        """Return the options with the type of weights of a measurement, if they leave it open.

        `facts` is the provenance of the measurement.  On a CPU the faster type is found anew at
        each start, and where both are nearly as fast it is now this one and now that one.
        """
        measured = facts.get("dtype", "")
        if self.dtype != "auto" or measured not in _MEASURED_DTYPES:
            return self
        return replace(self, dtype=measured)
