"""SLOs by name, and where the command line takes them."""

from __future__ import annotations

import math

import pytest

from slosched.cli.options import PromiseOptions, TracePromiseOptions
from slosched.core import SLO
from slosched.workload import NAMED_SLOS, named_slo


def test_the_limits_are_those_of_the_rules() -> None:
    assert named_slo("mlperf-llama3.1-8b-server") == SLO(ttft_s=2.0, tpot_s=0.1)
    assert named_slo("mlperf-gpt-oss-120b-interactive") == SLO(ttft_s=2.0, tpot_s=0.02)


def test_interactive_is_never_looser_than_server() -> None:
    for name, slo in NAMED_SLOS.items():
        assert slo.e2e_s is None or slo.e2e_s == math.inf
        if name.endswith("-interactive"):
            server = NAMED_SLOS[name.replace("-interactive", "-server")]
            assert slo.ttft_s <= server.ttft_s
            assert slo.tpot_s < server.tpot_s


def test_an_unknown_name_is_answered_with_the_nearest_one() -> None:
    with pytest.raises(ValueError, match=r"did you mean mlperf-deepseek-r1-server"):
        named_slo("mlperf-deepseek-r1-servr")


def test_a_name_is_the_promise_of_servers_and_of_traces() -> None:
    name = "mlperf-llama2-70b-interactive"
    assert PromiseOptions(slo_ttft=1.0, slo_name=name).slo() == SLO(0.45, 0.04)
    assert TracePromiseOptions(slo_tpot=1.0, slo_name=name).rule(None, 0) == SLO(0.45, 0.04)
    assert TracePromiseOptions(slo_name=name).fixed() == SLO(0.45, 0.04)
