from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from hypothesis.internal.conjecture import providers

if TYPE_CHECKING:
    from slosched.engine.torch import LoadedModel

# No time limits, as the machine may be busy; the benchmarks have them.  Every run draws the same
# examples, so hypothesis must not mix in constants of whichever modules are imported.
settings.register_profile("slosched", deadline=None, derandomize=True)
settings.load_profile("slosched")
providers.is_local_module_file = lambda path: False  # type: ignore[assignment]


@pytest.fixture(scope="session")
def smollm2() -> LoadedModel:
    """Return the real model in float32, where greedy output is exact; the first use downloads it."""
    from slosched.engine.torch import load_model

    return load_model("smollm2-135m", device="cpu", dtype="float32", num_threads=1)
