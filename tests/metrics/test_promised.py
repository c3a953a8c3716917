"""The sentence that says what was promised."""

from __future__ import annotations

import math

import pytest

from slosched.cli.promised import promised
from slosched.core import NO_SLO, SLO


@pytest.mark.parametrize(
    ("slos", "said"),
    [
        ([NO_SLO], ""),
        ([SLO(1.0, 0.05)] * 2, "Promised: TTFT 1 s, TPOT 50 ms."),
        ([SLO(0.5, 0.05), SLO(6.0, 0.1)], "Promised: TTFT 500 ms to 6 s, TPOT 50 ms to 100 ms."),
        ([SLO(1.0, math.inf), NO_SLO], "Promised: TTFT 1 s (some have none), no TPOT."),
        ([SLO(2.0, 0.05, 30.0)], "Promised: TTFT 2 s, TPOT 50 ms, end to end 30 s."),
    ],
)
def test_it_names_the_times_or_their_ranges(slos: list[SLO], said: str) -> None:
    assert promised(slos) == said
