"""Reads a model's weights from a directory, all of them or none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from slosched.engine.torch.embedded import ModelUnavailableError
from slosched.engine.torch.forward import ATTENTION_NAME, refusing_other_attention

UNREADABLE = (
    OSError,
    ValueError,
    RuntimeError,
    KeyError,
    ImportError,  # weights that are quantized in a way that needs another library
    SafetensorError,
    StrictDataclassError,  # a config that contradicts itself
)
"""What transformers raises for files that it cannot read."""


def read_checkpoint(directory: Path, dtype: torch.dtype) -> Any:
    """Return the transformers model in a directory, on the CPU, with slosched's attention.

    Raises ModelUnavailableError if the files cannot be read, or lack a weight of the model, and
    UnsupportedModelError for one that takes no attention but its own.
    """
    disable_progress_bar()  # it would mix with the caller's own
    try:
        with refusing_other_attention():
            model, found = AutoModelForCausalLM.from_pretrained(
                directory,
                dtype=dtype,
                attn_implementation=ATTENTION_NAME,
                local_files_only=True,
                trust_remote_code=False,  # else it asks at the terminal
                output_loading_info=True,
            )
    except UNREADABLE as error:
        raise ModelUnavailableError(f"the model in {directory} cannot be read: {error}") from error
    # transformers draws weights at random that are not there, and only warns of it.
    if missing := sorted(found["missing_keys"]):
        raise ModelUnavailableError(
            f"the *.safetensors in {directory} lack {len(missing)} of the model's weights, among "
            f"them {missing[0]!r}: were all files copied?"
        )
    return model
