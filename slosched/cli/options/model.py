"""The options for the model and the device that it runs on."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

import typer


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
        str, typer.Option(help="Type of the weights: auto, float32, bfloat16 or float16.")
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
