from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from slosched.engine.torch import LoadedModel


@pytest.fixture(scope="session")
def smollm2() -> LoadedModel:
    """The real model in float32, where greedy output is exact; the first use ever fetches it."""
    from slosched.engine.torch import load_model

    return load_model("smollm2-135m", dtype="float32", num_threads=1)
