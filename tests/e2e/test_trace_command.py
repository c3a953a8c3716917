"""`slosched trace`: parts of files, arrivals, SLOs, public traces, and notes on odd files."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import Said

from slosched.perfmodel import load_model
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


def test_every_command_that_takes_a_trace_thins_it_and_takes_its_bursts_away(cli: Cli) -> None:
    options = ("-n", "80", "--rate", "8", "--thin-to", "4", "--poisson", "--slo-ttft", "1s")
    said = cli("replay", "--trace", "azure_code", *options, "--slo-tpot", "50ms")
    assert said.status == 0
    assert "40 requests of azure_code" in said.out


def test_a_file_out_of_order_or_with_bad_rows_is_read_and_said_to_be_so(cli: Cli) -> None:
    rows = "5,1,1\n3,2,1\n6,0,1\nnan,1,1\n7,3,1\n"
    Path("odd.csv").write_text(f"arrival_s,input_tokens,output_tokens\n{rows}")
    said = cli("trace", "make", "odd.csv", "--skip-bad", "-o", "mended.csv")
    assert said.status == 0
    assert "note: odd.csv: 1 rows not in order of time: sorted" in said.out
    assert "note: odd.csv: 2 bad rows skipped (input_tokens: 1, arrival_s: 1)" in said.out
    assert read_trace("mended.csv").prompt_tokens.tolist() == [2, 1, 3]
    assert cli("trace", "show", "mended.csv").out.count("note:") == 2  # the file keeps the notes


def test_a_window_of_a_file_is_noted(cli: Cli) -> None:
    assert (
        cli("trace", "make", "poisson", "-n", "100", "--rate", "2", "-o", "t.parquet").status == 0
    )
    part = ("--start", "10s", "--duration", "20s")
    assert cli("trace", "make", "t.parquet", *part, "-o", "part.jsonl").status == 0
    part_of_it, whole = read_trace("part.jsonl"), read_trace("t.parquet")
    assert part_of_it.prompt_tokens.tolist() == whole.window(10, 20).prompt_tokens.tolist()
    assert part_of_it.provenance["window_start_s"] == 10.0
    assert (
        cli("trace", "make", "daily", "--duration", "1m", "--rate", "3", "-o", "d.csv").status == 0
    )
    assert len(read_trace("d.csv")) == 180


def test_promises_by_tier_and_by_the_prefill_of_each_prompt(cli: Cli) -> None:
    tiers = ("--slo-tier", "3:1s/50ms", "--slo-tier", "1:10s/200ms")
    assert cli("trace", "make", "sessions", "-n", "400", *tiers, "-o", "tiers.csv").status == 0
    drawn = Counter((r.slo.ttft_s, r.slo.tpot_s) for r in read_trace("tiers.csv").requests)
    assert drawn.keys() == {(1.0, 0.05), (10.0, 0.2)}
    assert drawn[1.0, 0.05] == pytest.approx(300, abs=40)

    device = ("--latency-model", "h100/llama-3.1-8b", "--slo-ttft", "0.5s+3x", "--slo-tpot", "1s")
    assert cli("trace", "make", "azure_conv", "-n", "50", *device, "-o", "x.csv").status == 0
    prefill_s = load_model("h100/llama-3.1-8b").predict_prefill
    for r in read_trace("x.csv").requests:
        assert r.slo.ttft_s == pytest.approx(0.5 + 3 * prefill_s(r.num_prompt_tokens))


def test_a_replay_promises_multiples_of_the_prefill_on_the_device_it_simulates(cli: Cli) -> None:
    for multiple, good in (("0.9x", "0.0%"), ("100x", "100.0%")):
        promise = ("--policy", "fcfs", "--slo-ttft", multiple, "--slo-tpot", "10s")
        said = cli("replay", "--trace", "azure_conv", "-n", "20", "--rate", "0.5", *promise)
        assert said.status == 0, said.complaint
        assert re.findall(r"\d+\.\d%", said.out)[0] == good


def test_a_public_trace_is_fetched_listed_and_found_by_its_name(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLOSCHED_CACHE", str(tmp_path / "cache"))
    mirror = tmp_path / "mirror.csv"
    mirror.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.97,5,6\n")
    sha256 = hashlib.sha256(mirror.read_bytes()).hexdigest()
    source = ("fetch", "azure_conv_2023", "--url", mirror.as_uri())
    refused = cli("trace", *source)
    assert refused.status == 1
    assert f"its sha256 is {sha256}, not 2f1e5b66" in refused.complaint
    fetched = cli("trace", *source, "--sha256", sha256)
    assert fetched.status == 0
    for said in ("Azure/AzurePublicDataset", "CC-BY-4.0", mirror.as_uri(), sha256, "wrote"):
        assert said in fetched.out
    assert "was there already" in cli("trace", *source, "--sha256", sha256).out
    assert "azure_conv_2023" in cli("trace", "show", "azure_conv_2023").out
    listed = cli("trace", "fetch").out
    assert "mooncake_toolagent" in listed
    assert listed.count("yes") == 1
    (tmp_path / "here").mkdir()
    assert cli("trace", *source, "--sha256", sha256, "--out", "here").status == 0
    assert (tmp_path / "here" / "azure_conv_2023.csv").read_bytes() == mirror.read_bytes()


def test_a_folder_hides_neither_a_kind_nor_a_public_trace_of_its_name(cli: Cli) -> None:
    for name in ("sharegpt", "azure_conv_2023"):
        Path(name).mkdir()
    said = cli("trace", "show", "sharegpt", "-n", "20")
    assert said.status == 0, said.complaint
    assert "Is a directory" not in cli("trace", "show", "azure_conv_2023").complaint
    assert "the scenarios make up such requests" in cli("judge", "edf", "--trace", "sharegpt").err
