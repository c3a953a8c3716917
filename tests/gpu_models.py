"""The tiny model on a GPU, for tests that capture CUDA graphs."""

from __future__ import annotations

import pytest

from slosched.engine.torch import BackendUnavailableError, LoadedModel, load_model


def tiny_on_gpu(attention: str) -> LoadedModel:
    """Return the model under this attention; skip the test if that does not run here."""
    try:
        return load_model("tiny-random", device="cuda", dtype="bfloat16", attention=attention)
    except BackendUnavailableError as error:
        pytest.skip(str(error))
