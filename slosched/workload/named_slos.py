"""SLOs by name: the latency limits of MLPerf Inference for language models.

Source: the rules of MLPerf Inference, table of datacenter benchmarks, as of 2026-07-23
(github.com/mlcommons/inference_policies, inference_rules.adoc, commit ac93e89).  At the highest
rate that counts there, P99 of TTFT and P99 of TPOT are each within their limits, arrivals are a
Poisson process, and a run lasts 600 seconds or more.  A rate that is found with these SLOs here is
no MLPerf result: those need the benchmark's model, data set and load generator.
"""

from __future__ import annotations

from slosched.core import SLO
from slosched.spelling import meant

NAMED_SLOS = {
    "mlperf-llama3.1-8b-server": SLO(2.0, 0.100),  # the rules call it conversational
    "mlperf-llama3.1-8b-interactive": SLO(0.5, 0.030),
    "mlperf-llama2-70b-server": SLO(2.0, 0.200),  # the rules call it conversational
    "mlperf-llama2-70b-interactive": SLO(0.450, 0.040),
    "mlperf-llama3.1-405b-server": SLO(6.0, 0.175),
    "mlperf-llama3.1-405b-interactive": SLO(4.5, 0.080),
    "mlperf-mixtral-8x7b-server": SLO(2.0, 0.200),
    "mlperf-deepseek-r1-server": SLO(2.0, 0.080),
    "mlperf-deepseek-r1-interactive": SLO(1.5, 0.015),
    "mlperf-gpt-oss-120b-server": SLO(3.0, 0.080),
    "mlperf-gpt-oss-120b-interactive": SLO(2.0, 0.020),
}
"""The SLOs by name: TTFT and TPOT in seconds."""


def named_slo(name: str) -> SLO:
    """Return the SLO of this name; raise ValueError, which lists the names, if there is none."""
    if name not in NAMED_SLOS:
        known = ", ".join(f"{each} ({_times(slo)})" for each, slo in NAMED_SLOS.items())
        raise ValueError(f"no SLO is called {name!r}{meant(name, NAMED_SLOS)}; there are {known}")
    return NAMED_SLOS[name]


def _times(slo: SLO) -> str:
    """Return TTFT and TPOT as people write them: "2s/100ms"."""
    return f"{slo.ttft_s:g}s/{1e3 * slo.tpot_s:g}ms"
