"""The check that a latency model was measured on the device that is to run."""

from __future__ import annotations

import math
import platform
import re
from collections.abc import Mapping
from pathlib import Path

from slosched.core import SloschedError
from slosched.perfmodel.model import FittedModel

_SETTINGS = ("model", "dtype", "threads", "attention")
"""Facts of a provenance on which the time of a step depends, besides the device."""


class OtherDeviceError(SloschedError):
    """A latency model was measured on another device than the one that is to run."""


def num_devices(model: FittedModel) -> int:
    """Return how many devices worked together on each step when the model was measured."""
    facts = model.provenance
    ways = [int(facts.get(f"{kind}_parallel_size", "1")) for kind in ("tensor", "pipeline")]
    return int(facts.get("num_gpus", math.prod(ways)))


def is_of_cpu(model: FittedModel) -> bool:
    """Tell whether a model was measured on a CPU: only there the number of threads is noted."""
    return bool(model.provenance.get("threads"))


def check_device(model: FittedModel, device: str, count: int = 1) -> None:
    """Raise OtherDeviceError if the model's provenance names another device, or another count.

    `device` is the name that the system gives the device. A model's name may have fewer words
    ("H100" for "NVIDIA H100 80GB HBM3"). A model that names no device passes.
    """
    measured = model.provenance.get("gpu") or model.provenance.get("device")
    if measured is None:
        return
    if num_devices(model) == count and _words(measured) <= _words(device):
        return
    theirs, ours = (f"{n} × " if n > 1 else "" for n in (num_devices(model), count))
    raise OtherDeviceError(
        f"the latency model is of {theirs}{measured}, but this device is {ours}{device}: its "
        "deadlines would be wrong; leave it out to have this device measured, or insist with "
        "--force"
    )


def other_settings(model: FittedModel, facts: Mapping[str, str]) -> str:
    """Return the settings with which the model was measured, where those here are others.

    `facts` are those of the model that is to run, by the names of a provenance.  What either does
    not say is taken to be the same.  Example: `dtype bfloat16 (here float32), threads 2 (here 1)`.
    """
    said = ((name, model.provenance.get(name), facts.get(name)) for name in _SETTINGS)
    return ", ".join(
        f"{name} {theirs} (here {ours})"
        for name, theirs, ours in said
        if theirs and ours and theirs != ours
    )


def cpu_name() -> str:
    """Return the system's name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _words(name: str) -> set[str]:
    return set(re.findall(r"[a-z0-9.]+", name.lower()))
