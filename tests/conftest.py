from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from hypothesis.internal.conjecture import providers

if TYPE_CHECKING:
    from slosched.engine.torch import LoadedModel

# A busy machine is not a bug: time limits belong to the benchmarks.  Every run draws the same
# examples; to that end hypothesis must not mix in constants of the modules that happen to be
# imported by then.
settings.register_profile("slosched", deadline=None, derandomize=True)
settings.load_profile("slosched")
providers.is_local_module_file = lambda path: False  # type: ignore[assignment]


@pytest.fixture(scope="session")
def smollm2() -> LoadedModel:
    """The real model in float32, where greedy output is exact; the first use ever fetches it."""
    from slosched.engine.torch import load_model

    return load_model("smollm2-135m", device="cpu", dtype="float32", num_threads=1)
