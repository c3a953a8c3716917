"""GPUs by their short names: `h100` is the bundled latency model of a model on that GPU."""

from __future__ import annotations

from pathlib import Path

from slosched.perfmodel import bundled_models
from slosched.spelling import meant

DEFAULT_MODEL_NAME = "llama-3.1-8b"


def model_on(gpu: str, model: str) -> str:
    """Return the name of the latency model of `model` on `gpu`, on as many GPUs as it has.

    Names may be in upper or lower case; a bundled one is returned in lower case.  The name or file
    of another latency model is returned as it is.  Raises ValueError if there is no such GPU, or no
    latency model of this model on it.
    """
    if Path(gpu).is_file():
        return gpu
    names = bundled_models()
    if "/" in gpu:
        return gpu.lower() if gpu.lower() in names else gpu
    wanted = f"{gpu}/{model}".lower()
    on_gpu = [name for name in names if name.startswith(f"{gpu.lower()}/")]
    if not on_gpu:
        gpus = sorted({name.partition("/")[0] for name in names})
        raise ValueError(
            f"--gpu {gpu}: no such GPU{meant(gpu.lower(), gpus)}; there are {', '.join(gpus)}, and "
            "any latency model by its name or file (`slosched profile --list`)"
        )
    found = [name for name in on_gpu if name == wanted or name.startswith(f"{wanted}-tp")]
    if len(found) != 1:
        raise ValueError(
            f"--gpu {gpu}: {'several latency models' if found else 'no latency model'} of "
            f"{model!r} on it; name one of {', '.join(found or on_gpu)}, or another --model"
        )
    return found[0]
