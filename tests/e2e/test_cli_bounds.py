"""`slosched bounds`, typed as a user would type it."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from command_line import Said

pytestmark = pytest.mark.e2e

Cli = Callable[..., Said]
ASKED = ("bounds", "--trace", "azure_code", "-n", "60", "--rate", "20", "--seed", "1")
FEW_SEATS = ("--max-num-seqs", "8")
"""With which there are fewer kinds of steps to be looked at."""


def test_bounds_prints_all_four_and_the_capacity(cli: Cli) -> None:
    device = ("--latency-model", "h100/llama-3.1-8b", *FEW_SEATS)
    said = cli(*ASKED, *device, "--capacity", "0.9")
    good = re.findall(r"│ (L\d)[^│]*│[^│]*│ *([\d.]+)% │", said.out)
    assert [name for name, _ in good] == ["L1", "L2", "L3", "L4"]
    assert "Promised: TTFT 1 s, TPOT 50 ms." in said.out
    assert all(0 < float(share) <= 100 for _, share in good)
    line = " ".join(said.out.split())
    found = re.search(r"90 % attainment is impossible above no known rate \(L1.*", line)
    assert found is not None
    assert re.search(
        r"and above ([\d.]+) requests/s if such requests never stopped coming", found[0]
    )


def test_a_share_and_a_rate_that_nothing_bounds_are_told_as_they_are(cli: Cli) -> None:
    said = cli("bounds", "--trace", "poisson", "-n", "2", "--no-hindsight", "--capacity", "0.495")
    line = " ".join(said.out.split())
    assert "49.5 % attainment is impossible above no known rate (L1 fluid), and above" in line


def test_a_promise_that_nothing_can_keep_is_impossible_at_any_rate(cli: Cli) -> None:
    asked = ("--no-hindsight", "--slo-ttft", "1us", "--slo-tpot", "50ms", "--capacity", "0.9")
    said = cli("bounds", "--trace", "poisson", "-n", "2", *asked)
    line = " ".join(said.out.split())
    assert "90 % attainment is impossible at any rate (L1 fluid), and at any rate if such" in line


def test_bounds_of_an_unreliable_device_are_for_reference(cli: Cli) -> None:
    said = cli(*ASKED, *FEW_SEATS, "--no-hindsight", "--noise", "0.1")
    assert "L3" not in said.out
    assert "For reference only: the simulated steps do not take what" in said.out
