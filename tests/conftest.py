from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from slosched.engine.torch import LoadedModel

# A busy machine is not a bug: time limits belong to the benchmarks.
settings.register_profile("slosched", deadline=None)
settings.load_profile("slosched")


@pytest.fixture(scope="session")
def smollm2() -> LoadedModel:
    """The real model in float32, where greedy output is exact; the first use ever fetches it."""
    from slosched.engine.torch import load_model

    return load_model("smollm2-135m", dtype="float32", num_threads=1)
