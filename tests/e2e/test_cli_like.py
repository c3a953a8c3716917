"""Engines as they ship on the command line: `--like vllm` and `-p like:vllm`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
from command_line import Said

pytestmark = pytest.mark.e2e

Cli = Callable[..., Said]
H100 = ("--latency-model", "h100/llama-3.1-8b", "--rate", "20", "-n", "30")
VLLM = (
    "like vllm 0.33: vllm_v1, 8192 tokens, 1024 requests, overlap, prefix cache hash, block 16, "
    "KV cache 446032 tokens (0.92 of the memory)"
)


def traced(file: Path) -> tuple[object, dict[str, object]]:
    """Return every step and request of a replay, and its provenance."""
    trace = json.loads(file.read_text())
    return trace["traceEvents"], trace["otherData"]


def test_an_engine_is_its_policy_with_its_settings_typed_out(cli: Cli, tmp_path: Path) -> None:
    said = cli("replay", "--like", "vllm", *H100, "--perfetto", "like.json")
    assert said.status == 0, said.err
    assert VLLM in said.out.splitlines()
    typed = "--max-num-batched-tokens 8192 --max-num-seqs 1024 --overlap --prefix-cache hash"
    words = (*typed.split(), "--kv-tokens", "446041", "--perfetto", "typed.json")
    assert cli("replay", "-p", "vllm_v1", *H100, *words).status == 0
    events, provenance = traced(tmp_path / "like.json")
    assert events == traced(tmp_path / "typed.json")[0]
    assert provenance["like vllm 0.33"] == VLLM.partition(": ")[2]


def test_what_is_typed_comes_before_the_engines_choice(cli: Cli) -> None:
    said = cli(
        *("replay", "--like", "vllm", "-p", "edf", *H100, "--no-overlap", "--max-num-seqs", "64"),
        *("--prefix-cache", "off", "--kv-tokens", "32000"),
    )
    assert said.status == 0, said.err
    assert (
        "like vllm 0.33: edf, 8192 tokens, 64 requests, no overlap, no prefix cache, block 16, "
        "KV cache 32000 tokens (given)"
    ) in said.out.splitlines()


def test_it_is_said_once_that_an_engines_steps_are_longer_than_any_measured(cli: Cli) -> None:
    said = cli(
        *("compare", "--like", "vllm", "-p", "fcfs", "--latency-model", "rtxpro6000/llama-3.1-8b"),
        *("--rate", "5", "-n", "20", "--no-figures"),
    )
    assert said.status == 0, said.err
    assert said.out.count("steps of up to 8192 tokens are longer than any") == 1


def test_engines_are_compared_each_under_its_own_settings(cli: Cli, tmp_path: Path) -> None:
    said = cli(
        *("compare", "-p", "goodput", "-p", "like:sglang", "-p", "like:vllm-0.6", *H100),
        *("-o", "out", "--no-figures"),
    )
    assert said.status == 0, said.err
    assert "like sglang 0.5.5: sglang:chunked_prefill_size=8192, 8192 tokens" in said.out
    assert "like vllm 0.6.3: vllm_v0:enable_chunked_prefill=true, 512 tokens" in said.out
    assert said.out.count("the prefix cache finds none") == 1
    report = (tmp_path / "out" / "report.html").read_text()
    assert "like:sglang" in report
    assert "0.835 of the memory with the weights" in report
    assert "No scheduler serves more than" in said.out, "without prefixes, a bound holds"


def test_with_an_engine_in_common_the_engine_itself_comes_first(cli: Cli, tmp_path: Path) -> None:
    said = cli(
        *("capacity", "--like", "vllm", "-p", "goodput", "--trace", "poisson", "-n", "40"),
        *("--seeds", "2", "--max-output-tokens", "8", "--target", "0.9", "--precision", "0.2"),
        *("--jobs", "1", "--no-bound", "--shared-rates", "2", "-o", "out"),
    )
    assert said.status == 0, said.err
    assert "like vllm 0.33: vllm_v1, 2048 tokens, 256 requests" in said.out
    capacities = pd.read_csv(tmp_path / "out" / "capacities.csv")
    assert list(capacities.policy) == ["like:vllm", "goodput"]
    assert "like vllm 0.33" in (tmp_path / "out" / "report.html").read_text()


@pytest.mark.parametrize("words", [("--like", "vlm"), ("-p", "like:vlm")])
def test_an_unknown_engine_is_refused_with_the_nearest_name(
    cli: Cli, words: tuple[str, ...]
) -> None:
    said = cli("compare", *words)
    assert said.status != 0
    assert "no engine 'vlm' (did you mean vllm?)" in said.complaint


@pytest.mark.parametrize("fleet", [(), ("--replicas", "2")])
def test_a_bound_is_one_for_an_engine_that_hides_the_hosts_time(
    cli: Cli, fleet: tuple[str, ...]
) -> None:
    """With 12 ms of the host no step is in time, except where it runs beside the one before."""
    said = cli(
        *("compare", "-p", "fcfs", "-p", "like:vllm", *H100, "--slo-tpot", "16ms", "--noise", "0"),
        *("--server-time", "1us,1us,12ms", "--no-figures", *fleet),
    )
    assert said.status == 0, said.err
    assert "No scheduler serves more than 30 of the 30 requests well" in said.out
    shares = [line.split("│")[3].strip() for line in said.out.splitlines() if "│" in line]
    assert shares[0] == "0.0%"
    assert float(shares[1].rstrip("%")) > 80


def test_the_bound_of_a_capacity_is_one_for_an_engine_that_hides_the_hosts_time(cli: Cli) -> None:
    said = cli(
        *("capacity", "-p", "fcfs", "-p", "like:vllm", "--trace", "poisson", "-n", "60"),
        *("--seeds", "1", "--target", "0.9", "--shared-rates", "0", "-j", "1"),
        *(*H100[:2], "--slo-tpot", "16ms", "--server-time", "1us,1us,12ms", "--noise", "0"),
    )
    assert said.status == 0, said.err
    assert "│ any scheduler (bound) │        ≤ 0 │" not in said.out
