"""`slosched trace`: bursts thinned out or taken away, and where a trace comes from."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from command_line import Said

from slosched.workload import read_trace
from slosched.workload.statistics import interarrival_cv

pytestmark = pytest.mark.e2e

Cli = Callable[..., Said]


def test_a_poisson_control_has_the_same_requests_at_the_same_rate_without_bursts(cli: Cli) -> None:
    assert cli("trace", "make", "azure_code", "-n", "2000", "-o", "bursty.csv").status == 0
    assert cli("trace", "make", "bursty.csv", "--poisson", "-o", "control.csv").status == 0
    bursty, control = read_trace("bursty.csv"), read_trace("control.csv")
    assert interarrival_cv(bursty.arrivals_s) > 3
    assert interarrival_cv(control.arrivals_s) == pytest.approx(1, abs=0.1)
    assert control.rate == pytest.approx(bursty.rate)
    assert control.prompt_tokens.tolist() == bursty.prompt_tokens.tolist()


def test_thinning_leaves_a_part_and_the_provenance_says_so(cli: Cli) -> None:
    options = ("-n", "800", "--rate", "8", "--thin-to", "2", "--seed", "3")
    assert cli("trace", "make", "azure_conv", *options, "-o", "thin.csv").status == 0
    thin = read_trace("thin.csv")
    assert len(thin) == 200
    assert thin.rate == pytest.approx(2, rel=0.1)
    shown = cli("trace", "show", "thin.csv").out
    assert "thinned_to" in shown
    assert "thinning_seed" in shown


def test_a_trace_cannot_be_thinned_to_more_than_it_has(cli: Cli) -> None:
    said = cli("trace", "show", "poisson", "--rate", "2", "--thin-to", "4")
    assert said.status != 0
    assert "can be thinned to a rate in (0, 2] requests/s" in said.complaint
