"""Facts about GPUs, looked up by the names that CUDA gives them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeVar

Fact = TypeVar("Fact")


def fact_of(gpu: str, facts: Mapping[str, Fact]) -> Fact | None:
    """Return the fact whose key is part of the GPU's name, in whole words; None if there is none.

    So "L4" is not part of "NVIDIA L40", nor "B200" of "NVIDIA GB200".
    """
    return next(
        (fact for name, fact in facts.items() if re.search(rf"\b{re.escape(name)}\b", gpu)), None
    )
