"""The one model with real weights that is available without a hub."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from slosched.engine.model_path import ModelUnavailableError
from slosched.engine.torch.embedded import embedded_model_dir

vllm_is_installed = pytest.mark.skipif(
    find_spec("vllm") is None, reason="vLLM is not installed here: run `make test-vllm`"
)
"""Tests that start servers use this name instead of vLLM, whose import takes as long as a server.
"""

vllm_has_kernels = pytest.mark.skipif(
    find_spec("vllm") is None or find_spec("vllm._C") is None,
    reason="this vLLM computes nothing: it was built without kernels (tests/inside_vllm/set_up.py)",
)


def smollm2() -> Path:
    """Return the model's directory; skip the test if it is not available."""
    try:
        return embedded_model_dir()
    except ModelUnavailableError as error:
        pytest.skip(str(error))
