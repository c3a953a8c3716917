"""Latency models as JSON files, and those that come with slosched."""

from __future__ import annotations

import json
from dataclasses import asdict
from importlib import resources
from pathlib import Path

from slosched.core import SloschedError
from slosched.perfmodel.linear import AttentionWork, LinearCoefficients, LinearModel

_FORMAT = "slosched-latency-model/1"


class ModelFileError(SloschedError):
    """A latency model cannot be read."""


def save_model(model: LinearModel, path: Path) -> None:
    document = {
        "format": _FORMAT,
        "form": "linear",
        "attention": model.attention.value,
        "coefficients": asdict(model.coefficients),
        "held_out_error_percent": dict(model.held_out_error),
        "provenance": dict(model.provenance),
    }
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def load_model(name_or_path: str | Path) -> LinearModel:
    """A model from a file, or a bundled one by its name (see `bundled_models`)."""
    path = Path(name_or_path)
    if not path.exists() and str(name_or_path) in bundled_models():
        return _parse(_bundle().joinpath(f"{name_or_path}.json").read_bytes(), str(name_or_path))
    try:
        return _parse(path.read_bytes(), str(path))
    except OSError as error:
        known = ", ".join(bundled_models()) or "none"
        raise ModelFileError(
            f"no latency model {str(name_or_path)!r}: neither a file ({error.strerror}) nor one of "
            f"the bundled ones ({known}); `slosched profile` and `slosched fit` make one"
        ) from error


def bundled_models() -> list[str]:
    return sorted(
        entry.name.removesuffix(".json")
        for entry in _bundle().iterdir()
        if entry.name.endswith(".json")
    )


def _bundle() -> resources.abc.Traversable:
    return resources.files("slosched.perfmodel").joinpath("bundled")


def _parse(text: bytes, source: str) -> LinearModel:
    try:
        document = json.loads(text)
        if document["format"] != _FORMAT:
            raise ModelFileError(f"{source} has the format {document['format']!r}, not {_FORMAT!r}")
        return LinearModel(
            LinearCoefficients(**document["coefficients"]),
            AttentionWork(document["attention"]),
            provenance=document.get("provenance", {}),
            held_out_error=document.get("held_out_error_percent", {}),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ModelFileError(
            f"{source} is not a latency model ({type(error).__name__}: {error}); "
            "write one with `slosched fit`"
        ) from error
