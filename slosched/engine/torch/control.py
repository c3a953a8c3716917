"""TorchControl: replaces the weights of a loaded model and records what its steps do."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from slosched.core import OperationError
from slosched.engine.model_path import ModelUnavailableError
from slosched.engine.torch.checkpoint import read_checkpoint
from slosched.engine.torch.forward import UnsupportedModelError
from slosched.engine.torch.model import LoadedModel


def _here(function: Callable[[], object]) -> object:
    return function()


class TorchControl:
    """Operations on a loaded model while a server runs.

    `profile_dir` is where profiles are written; None allows none.  `on_device` calls a function in
    the thread that runs the steps, which is the only one that torch's profiler sees.
    """

    def __init__(
        self,
        model: LoadedModel,
        profile_dir: Path | None = None,
        on_device: Callable[[Callable[[], object]], object] = _here,
    ) -> None:
        self._model = model
        self._profile_dir = profile_dir
        self._on_device = on_device
        self._profiler: Any | None = None
        self._ended: Any | None = None

    def read_weights(self, model_path: str) -> dict[str, Tensor]:
        """Return the weights of a model directory, on the CPU, by name.

        Raises OperationError if they cannot be read or are not those of a model of the same shape.
        """
        path = Path(model_path).expanduser()
        if not (path / "config.json").is_file() or not any(path.glob("*.safetensors")):
            raise OperationError(f"{model_path!r} holds no config.json with *.safetensors")
        try:
            model = read_checkpoint(path, self._model.dtype)
        except (ModelUnavailableError, UnsupportedModelError) as error:
            raise OperationError(str(error)) from error
        weights = cast("dict[str, Tensor]", model.state_dict())
        ours = self._model.model.state_dict()
        differing = [
            name
            for name in sorted(ours.keys() | weights.keys())
            if name not in ours or name not in weights or ours[name].shape != weights[name].shape
        ]
        if differing:
            raise OperationError(
                f"{model_path!r} is another architecture than {self._model.name!r}: "
                f"{len(differing)} weights differ in name or shape, the first is {differing[0]!r}"
            )
        return weights

    def install_weights(self, weights: object) -> None:
        """Copy what `read_weights` returned over the weights of the model, in place."""
        with torch.no_grad():
            self._model.model.load_state_dict(weights)
        if self._model.device.type == "cuda":
            torch.cuda.synchronize(self._model.device)

    def start_profile(self) -> None:
        if self._profile_dir is None:
            raise OperationError("start the server with --torch-profiler-dir DIR to profile it")
        if self._profiler is not None:
            raise OperationError("a profile is being recorded; POST /stop_profile ends it")
        kinds = torch.profiler.ProfilerActivity
        gpu = [kinds.CUDA] if self._model.device.type == "cuda" else []
        profiler = torch.profiler.profile(activities=[kinds.CPU, *gpu])
        self._on_device(profiler.start)
        self._profiler = profiler

    def stop_profile(self) -> None:
        if self._profiler is None:
            raise OperationError("no profile is being recorded; POST /start_profile begins one")
        profiler, self._profiler = self._profiler, None
        self._on_device(profiler.stop)
        self._ended = profiler

    def write_profile(self) -> str:
        """Write the profile that ended last, for chrome://tracing or Perfetto."""
        ended, self._ended = self._ended, None
        assert ended is not None
        assert self._profile_dir is not None
        self._profile_dir.mkdir(parents=True, exist_ok=True)
        at = time.strftime("%Y%m%d-%H%M%S")
        path = self._profile_dir / f"slosched-{at}-{time.monotonic_ns()}.pt.trace.json.gz"
        ended.export_chrome_trace(str(path))
        return str(path)
