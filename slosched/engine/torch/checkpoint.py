"""Reads a model's weights from a directory, all of them or none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from slosched.engine.model_path import ModelUnavailableError
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

    Raises ModelUnavailableError if the files cannot be read, lack a weight of the model, or have
    one that does not fit or that its layers leave out, and UnsupportedModelError for a model that
    takes no attention but its own.
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
                ignore_mismatched_sizes=True,  # they are named below
            )
    except UNREADABLE as error:
        raise ModelUnavailableError(f"the model in {directory} cannot be read: {error}") from error
    # transformers draws weights at random that are not there, and only warns of it.
    if missing := sorted(found["missing_keys"]):
        raise ModelUnavailableError(
            f"the *.safetensors in {directory} lack {len(missing)} of the model's weights, among "
            f"them {missing[0]!r}: were all files copied?"
        )
    if misfits := sorted(found["mismatched_keys"]):
        name, *shapes = misfits[0]
        there, wanted = map(list, shapes)
        raise ModelUnavailableError(
            f"{len(misfits)} of the weights in {directory} have other shapes than config.json "
            f"gives them, among them {name!r}: {there}, not {wanted}; config.json is that of "
            "another model, or the weights are packed by a quantization that it does not name"
        )
    # It leaves out what it does not know, such as the scales of quantized weights.
    layers = {name.rpartition(".")[0] for name, _ in model.named_parameters()}
    left_out = sorted(n for n in found["unexpected_keys"] if n.rpartition(".")[0] in layers)
    if left_out:
        quantization = getattr(model.config, "quantization_config", None)
        raise ModelUnavailableError(
            f"the layers of {type(model).__name__} leave out {len(left_out)} of the weights in "
            f"{directory}, among them {left_out[0]!r}, so that its answers would be wrong: they "
            "are quantized in a way that transformers does not know from config.json "
            f"(quantization_config={quantization}), or config.json is that of another model; mend "
            "it, or serve a model that is not quantized"
        )
    return model
