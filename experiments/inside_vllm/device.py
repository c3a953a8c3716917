"""The measurement of a real device before it is used, with `profile` and `fit` as users do it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from experiments.inside_vllm.server import VLLM_PYTHON
from experiments.inside_vllm.setups import Setup
from slosched.core import SloschedError
from slosched.engine.torch.embedded import SMOLLM2
from slosched.perfmodel import load_model
from slosched.perfmodel.device import OtherDeviceError, check_device, cpu_name


class ProfileError(SloschedError):
    """vLLM's steps could not be measured."""


def is_measured(setup: Setup) -> bool:
    """Tell whether the setup's latency model is of the device that it will run on."""
    if setup.is_emulated:
        return True
    path = Path(setup.latency_model)
    if not path.exists():
        return False
    try:
        check_device(load_model(path), cpu_name())
    except OtherDeviceError:
        return False
    return True


def measure(setup: Setup, folder: Path) -> None:
    """Measure vLLM's steps with the setup's options, and fit the model to them.

    Raises ProfileError with the output of the command if it fails.
    """
    steps = folder / f"{setup.name}-device.csv"
    steps.parent.mkdir(parents=True, exist_ok=True)
    _slosched(setup, *_profile_words(setup), "--overwrite", "-o", str(steps), *_vllm_words(setup))
    _slosched(setup, "fit", str(steps), "-o", setup.latency_model)


def _profile_words(setup: Setup) -> tuple[str, ...]:
    return (
        *("profile", "--engine", "vllm", SMOLLM2),
        *("--max-num-batched-tokens", str(setup.policy_budget)),
        *("--max-num-seqs", str(setup.max_num_seqs)),
        *("--kv-tokens", str(setup.kv_tokens), "--block-size", str(setup.block_size)),
        *("--dtype", setup.dtype, "--time-limit", "5m"),
    )


def _vllm_words(setup: Setup) -> tuple[str, ...]:
    return ("--", *setup.options, "--max-model-len", str(setup.max_model_len))


def _slosched(setup: Setup, *words: str) -> None:
    done = subprocess.run(
        [str(VLLM_PYTHON), "-m", "slosched", *words],
        env={**os.environ, **setup.environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise ProfileError(f"`slosched {' '.join(words)}` failed:\n{done.stdout[-3000:]}")
