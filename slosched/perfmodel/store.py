"""Latency models as JSON files, and the models that come with slosched."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from difflib import get_close_matches
from importlib import resources
from pathlib import Path
from typing import Any

from slosched.core import SloschedError
from slosched.perfmodel.forms import READERS
from slosched.perfmodel.model import FittedModel
from slosched.perfmodel.server_time import ServerTime

MODEL_FORMAT = "slosched-latency-model/2"
_WORDS = ("attention", "features", "kind")
"""The names of parameters that may be words; all others are numbers."""

DEFAULT_MODEL = "rtx4090/llama-3.1-8b"
"""The bundled model of a simulation that names none: measured kernels on a common GPU."""


class ModelFileError(SloschedError):
    """A latency model cannot be read."""


def save_model(model: FittedModel, path: Path) -> None:
    document: dict[str, object] = {
        "format": MODEL_FORMAT,
        "form": model.form,
        "parameters": model.parameters(),
        "held_out_error_percent": dict(model.held_out_error),
        "provenance": dict(model.provenance),
    }
    if not model.server_time.is_none:
        document["server_time"] = asdict(model.server_time)
    if model.noise:
        document["noise"] = model.noise
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def load_model(name_or_path: str | Path, *, force: bool = False) -> FittedModel:
    """Load a model from a file, or a bundled one by its name, in upper or lower case.

    See `bundled_models` for the names. Raises ModelFileError if there is no such model, or if the
    file has another format. With `force` a file of another format is read as far as possible.
    """
    path = Path(name_or_path)
    name = str(name_or_path).lower()
    if not path.is_file() and name in bundled_models():
        return _parse(_bundle().joinpath(f"{name}.json").read_bytes(), name)
    try:
        return _parse(path.read_bytes(), str(path), force=force)
    except OSError as error:
        raise ModelFileError(
            f"no latency model {str(name_or_path)!r}: neither a file ({error.strerror}) nor a "
            f"bundled one; {_nearest(name)} (`slosched profile --list` shows them, `slosched "
            "profile` and `slosched fit` make one)"
        ) from error


def bundled_models() -> list[str]:
    """List the names of the bundled models: `gpu/model`, in lower case and sorted."""
    return sorted(
        f"{gpu.name}/{entry.name.removesuffix('.json')}"
        for gpu in _bundle().iterdir()
        if gpu.is_dir()
        for entry in gpu.iterdir()
        if entry.name.endswith(".json")
    )


def _nearest(name: str) -> str:
    """Return a question with the names that may have been meant, or a list of all names."""
    known = bundled_models()
    # Most slips are one half of the name alone, a "-" for the "/", or a letter.
    spelt = {bundled.replace("/", "-"): bundled for bundled in known}
    close = get_close_matches(name.replace("/", "-"), spelt, n=4, cutoff=0.7)
    meant = [k for k in known if name in k.split("/")] or [spelt[word] for word in close]
    return f"did you mean {' or '.join(meant)}?" if meant else f"bundled are {', '.join(known)}"


def _bundle() -> resources.abc.Traversable:
    return resources.files("slosched.perfmodel").joinpath("bundled")


def _parse(text: bytes, source: str, *, force: bool = False) -> FittedModel:
    document = _document(text, source)
    try:
        if document["format"] != MODEL_FORMAT and not force:
            raise ModelFileError(
                f"{source} has the format {document['format']!r}, this slosched reads "
                f"{MODEL_FORMAT!r}; fit its profile anew with `slosched fit`, or use --force"
            )
        form, parameters = document["form"], document["parameters"]
        if form not in READERS:
            raise ModelFileError(
                f"{source} has the form {form!r}; this slosched knows {', '.join(READERS)}"
            )
        server_time, noise = document.get("server_time", {}), document.get("noise", 0.0)
        _check_numbers("parameters", parameters)
        _check_numbers("noise", noise)
        return READERS[form](
            parameters,
            provenance=dict(document.get("provenance", {})),
            held_out_error=document.get("held_out_error_percent", {}),
            server_time=ServerTime(**server_time),
            noise=noise,
        )
    except KeyError as error:
        raise _no_model(source, f"it has no {error}") from error
    except (AttributeError, TypeError, ValueError, ZeroDivisionError) as error:
        raise _no_model(source, f"{type(error).__name__}: {error}") from error


def _document(text: bytes, source: str) -> dict[str, Any]:
    """Return the JSON object that a file holds."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _no_model(source, f"it is not JSON, {error}") from error
    if not isinstance(document, dict):
        raise _no_model(source, "it is JSON, but no object")
    return document


def _no_model(source: str, why: str) -> ModelFileError:
    return ModelFileError(
        f"{source} is not a latency model ({why}); make one: `slosched profile -o profile.csv`, "
        "then `slosched fit profile.csv -o model.json`"
    )


def _check_numbers(name: str, value: object) -> None:
    """Raise ValueError unless all values but `_WORDS` are finite numbers that are not negative."""
    if isinstance(value, dict):
        for key, inner in value.items():
            _check_numbers(key, inner)
    elif isinstance(value, list):
        for inner in value:
            _check_numbers(name, inner)
    elif name not in _WORDS and not (isinstance(value, int | float) and 0 <= value < math.inf):
        raise ValueError(f"{name} must be a number, finite and not negative, but is {value!r}")
