"""The one model with real weights that is at hand without a hub."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from slosched.engine.torch.embedded import ModelUnavailableError, embedded_model_dir

vllm_is_installed = pytest.mark.skipif(
    find_spec("vllm") is None, reason="vLLM is not installed here: run `make test-vllm`"
)
"""For tests that start servers: to import vLLM here as well would take as long as a server."""

vllm_has_kernels = pytest.mark.skipif(
    find_spec("vllm") is None or find_spec("vllm._C") is None,
    reason="this vLLM computes nothing: it was built without kernels (tests/inside_vllm/set_up.py)",
)


def smollm2() -> Path:
    """Its directory; the test is skipped where it can not be had."""
    try:
        return embedded_model_dir()
    except ModelUnavailableError as error:
        pytest.skip(str(error))
