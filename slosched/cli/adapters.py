"""The options for the LoRA adapters of a server."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer


@dataclass(frozen=True)
class AdapterOptions:
    """The adapters that are served, and what may become of them."""

    lora: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=PATH",
            help="Serve the LoRA adapter in a directory (peft's format) as the model NAME, too; "
            "several times for several.",
        ),
    ] = None
    max_loras: Annotated[
        int | None,
        typer.Option(min=1, help="Different LoRA adapters in one step.  Default: no limit."),
    ] = None
    allow_lora_updates: Annotated[
        bool,
        typer.Option(
            "--allow-lora-updates",
            help="Let clients load adapters from any directory of this machine, and unload them: "
            "/v1/load_lora_adapter, /v1/unload_lora_adapter.",
        ),
    ] = False

    def paths(self, model_name: str, *, is_emulated: bool) -> dict[str, Path]:
        """Return the directories of the adapters by name.

        Raises ValueError for a name that is taken, and for what an emulated device cannot do.
        """
        if is_emulated and (self.lora or self.allow_lora_updates):
            raise ValueError("an emulated device runs no model, so it can load no LoRA adapter")
        paths: dict[str, Path] = {}
        for text in self.lora or ():
            name, _, path = text.partition("=")
            if not (name and path):
                raise ValueError(f"--lora takes NAME=PATH, as in sql=adapters/sql, not {text!r}")
            if name in paths or name == model_name:
                raise ValueError(f"--lora {text!r}: there are two models of the name {name!r}")
            paths[name] = Path(path).expanduser()
        return paths
