"""The one model with real weights that is at hand without a hub."""

from __future__ import annotations

from pathlib import Path

import pytest

from slosched.engine.torch.embedded import ModelUnavailableError, embedded_model_dir


def smollm2() -> Path:
    """Its directory; the test is skipped where it can not be had."""
    try:
        return embedded_model_dir()
    except ModelUnavailableError as error:
        pytest.skip(str(error))
