"""`--replicas` and `--router`: several simulated replicas on the command line."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from command_line import Said

from slosched.replay.files import read_records

pytestmark = pytest.mark.e2e

Cli = Callable[..., Said]
SHORT = ("--trace", "poisson", "-n", "40", "--max-output-tokens", "8")


def test_replay_on_unequal_replicas_one_of_which_fails(cli: Cli, tmp_path: Path) -> None:
    fleet = ["--replicas", "1:h100/llama-3.1-8b,1:l40s/llama-3.1-8b", "--router", "predicted_ttft"]
    failure = ["--fail", "0@500ms", "--startup", "1s", "--router-delay", "100ms"]
    said = cli("replay", *SHORT, "--rate", "40", *fleet, *failure, "--perfetto", "a.json")
    assert said.status == 0, said.err
    found = json.loads((tmp_path / "a.json").read_text())["otherData"]
    assert found["replicas"] == "1 x h100/llama-3.1-8b, 1 x l40s/llama-3.1-8b"
    assert found["router"] == "PredictedTTFT()"
    assert found["replica failures"] == "0@0.5s"
    assert "when all requests have arrived" not in said.out


def test_a_failure_after_the_last_arrival_is_told(cli: Cli) -> None:
    said = cli("replay", *SHORT, "--rate", "40", "--replicas", "2", "--fail", "1@2s")
    assert "replica 1 fails at 2 s, when all requests have arrived (the last one at 0.9" in said.out


def test_a_failure_of_a_place_on_which_nothing_runs_is_told(cli: Cli) -> None:
    fleet = ("--replicas", "1..3", "--startup", "500ms", "--fail", "0@300ms", "--fail", "2@400ms")
    said = cli("compare", *SHORT, "--rate", "20", *fleet, "-p", "fcfs", "--no-figures")
    assert said.status == 0, said.err
    told = " ".join(said.out.split())
    assert "note: fcfs: nothing fails at 0.4 s, when no replica runs on place 2" in told
    assert "place 0" not in told


def test_compare_plays_each_policy_behind_each_router(cli: Cli) -> None:
    routers = ["--router", "round_robin", "--router", "power_of_two:seed=1"]
    said = cli("compare", *SHORT, "--replicas", "2", *routers, "-p", "fcfs", "--no-figures")
    assert said.status == 0, said.err
    assert "fcfs behind round_robin" in said.out
    assert "fcfs behind power_of_two:seed=1" in said.out
    assert "on these replicas" in said.out
    assert "bound" in said.out.split("on these replicas")[0], "the table has a column for the share"


def test_compare_scales_a_fleet_by_each_scaler(cli: Cli, tmp_path: Path) -> None:
    scalers = ["--scaler", "queue_length:target=1,every_s=0.2,hold_s=1", "--scaler", "predicted"]
    scaled = ["--replicas", "1..3", "--startup", "500ms", *scalers]
    said = cli("compare", *SHORT, "--rate", "20", *scaled, "-p", "fcfs", "-o", "out")
    assert said.status == 0, said.err
    assert "fcfs scaled by predicted" in said.out
    assert "seconds" in said.out, "the table has GPU seconds"
    report = (tmp_path / "out" / "report.html").read_text()
    assert "gpu_s" in report
    assert "fewest replicas" in report
    assert (tmp_path / "out" / "replicas.png").exists()


def test_no_number_of_a_wide_table_is_cut_short(cli: Cli) -> None:
    sessions = ("--trace", "agents", "-n", "20", "--slo-ttft", "2s", "--slo-tpot", "50ms")
    device = ("--latency-model", "h100/llama-3.1-8b", "--prefix-cache", "hash", "--replicas", "2")
    said = cli("replay", *sessions, "--slo-program", "1x", *device)
    assert said.status == 0, said.err
    assert "…" not in said.out
    assert re.search(r"│goodput│.* ms│.*%│.*%│ +\d+│", said.out)
    assert re.search(r"rejected┃.*cached┃ on time┃seconds┃", said.out)


SUMMARIZED = ("--replicas", "3", "--summary", "--jobs", "1")


def test_a_summary_says_what_the_whole_replay_says(cli: Cli, tmp_path: Path) -> None:
    device = ["--latency-model", "h100/llama-3.1-8b", "-p", "fcfs"]
    load = [*SHORT, "--rate", "60", *device, "--slo-ttft", "25ms", "--slo-tpot", "20ms"]
    whole = cli("replay", *load, "--replicas", "3", "-o", "whole", "--no-figures")
    said = cli("replay", *load, *SUMMARIZED, "-o", "rows")
    assert said.status == whole.status == 0, said.err + whole.err
    records = read_records(tmp_path / "whole" / "records.jsonl").records
    with np.load(tmp_path / "rows" / "requests.npz") as rows:
        ttft_s, share = rows["ttft_s"].tolist(), rows["is_good"].mean()
    assert ttft_s == [record.ttft_s for record in records]
    assert 0 < share < 1
    for shown in (said.out, whole.out):
        assert f"{share:.1%}" in shown
        assert "Promised: TTFT 25 ms, TPOT 20 ms." in shown


@pytest.mark.parametrize("number", [1, 2])
def test_a_summary_of_requests_that_come_at_once_has_no_rate(cli: Cli, number: int) -> None:
    rows = "".join("0,10,5\n" for _ in range(number))
    Path("t.csv").write_text(f"arrival_s,input_tokens,output_tokens\n{rows}")
    said = cli("replay", "--trace", "t.csv", *SUMMARIZED, "-p", "fcfs")
    assert said.status == 0, said.err
    assert re.search(r"│ fcfs +│ +- │", said.out)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (["--replicas", "2", "--jobs", "2"], "--jobs is for --summary"),
        (["--summary"], "give --replicas 100"),
        ([*SUMMARIZED, "--fail", "0@1s"], "without a scaler, failures"),
        ([*SUMMARIZED, "--router", "power_of_two"], "looks at replicas"),
        ([*SUMMARIZED, "--perfetto", "a.json"], "--perfetto shows every step"),
        ([*SUMMARIZED, "--priority", "0.5:-1"], "differs from the others"),
        ([*SUMMARIZED, "--rate", "5", "--duration", "10s"], "leave out one of the two"),
    ],
)
def test_a_summary_needs_replicas_that_do_not_depend_on_each_other(
    cli: Cli, given: list[str], why: str
) -> None:
    said = cli("replay", *SHORT, *given)
    assert said.status == 1
    assert why in " ".join(said.err.split())


def test_a_fleet_of_a_fixed_size_says_what_it_costs(cli: Cli, tmp_path: Path) -> None:
    fleet = ("--replicas", "2:h100/llama-3.1-70b-tp4")
    said = cli("replay", *SHORT, *fleet, "-o", "out", "--no-figures")
    assert said.status == 0, said.err
    records = read_records(tmp_path / "out" / "records.jsonl").records
    end_s = max(record.end_s or 0.0 for record in records)
    cells = said.out.replace("│", " ").split()
    assert f"{8 * end_s:,.0f}" in cells, "two replicas of four GPUs each, to the last end"


def test_the_capacity_of_two_replicas_is_larger_than_that_of_one(cli: Cli, tmp_path: Path) -> None:
    search = ["--seeds", "1", "--target", "0.9", "--precision", "0.2", "--jobs", "1", "--no-bound"]
    rates = []
    for more in ([], ["--replicas", "2", "--router", "least_requests"]):
        command = ["capacity", *SHORT, *search, "--shared-rates", "0", "-p", "fcfs", *more]
        said = cli(*command, "-o", "out")
        assert said.status == 0, said.err
        rates.append(float(pd.read_csv(tmp_path / "out" / "capacities.csv").requests_per_s[0]))
    assert rates[1] > 1.4 * rates[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--router", "round_robin"], "add --replicas 4"),
        (["--replicas", "0"], "with at least one replica"),
        (["--replicas", "2:"], "with at least one replica"),
        (["--replicas", "2", "--router", "robin"], "no router 'robin'"),
        (["--replicas", "3..2"], "is not MIN..MAX"),
        (["--replicas", "1..2,1:l40s/llama-3.1-8b"], "are of one kind"),
        (["--replicas", "1..2", "--scaler", "predict"], "did you mean predicted"),
        (["--replicas", "2", "--scaler", "predicted"], "--replicas 2..8"),
        (["--scaler", "predicted"], "add --replicas 4"),
        (["--replicas", "1..2", "--scaler", "predicted", "--scaler", "kv_use"], "one --scaler"),
        (["--replicas", "2", "--fail", "1"], "--fail '1' is not REPLICA@TIME"),
        (["--replicas", "2", "--fail", "1@soon"], "--fail '1@soon': 'soon' is not a duration"),
        (["--replicas", "2", "--fail", "2@1s"], "there are replicas 0 to 1"),
        (
            ["--replicas", "2", "--router", "round_robin", "--router", "least_tokens"],
            "one --router",
        ),
    ],
)
def test_a_fleet_that_cannot_be_is_refused(cli: Cli, arguments: list[str], message: str) -> None:
    said = cli("replay", *SHORT, *arguments)
    assert said.status != 0
    assert message in said.complaint


POOLS = ("--prefill-replicas", "1", "--decode-replicas", "1", "--kv-bandwidth", "50GB/s")


def test_replay_in_a_prefill_and_a_decode_pool(cli: Cli, tmp_path: Path) -> None:
    joined = ["--kv-latency", "1ms", "--kv-sent-by", "layer", "--decode-router", "round_robin"]
    said = cli("replay", *SHORT, "--rate", "10", *POOLS, *joined, "--perfetto", "a.json")
    assert said.status == 0, said.err
    found = json.loads((tmp_path / "a.json").read_text())["otherData"]
    assert found["prefill replicas"] == found["decode replicas"] == "1 x rtx4090/llama-3.1-8b"
    assert (found["prefill router"], found["decode router"]) == ("RoundRobin()", "RoundRobin()")
    assert found["kv transfer num_parts"] == 32, "Llama-3.1-8B has 32 layers"
    assert found["kv transfer bytes_per_token"] == 2 * 32 * 8 * 128 * 2, "K and V in 2 bytes"
    assert found["kv transfer latency_s"] == 0.001


def test_the_capacity_of_two_pools_is_searched(cli: Cli) -> None:
    search = ["--seeds", "1", "--target", "0.9", "--precision", "0.2", "--jobs", "1", "--no-bound"]
    said = cli("capacity", *SHORT, *POOLS, "-p", "fcfs", *search)
    assert said.status == 0, said.err


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (["--prefill-replicas", "1"], "a prefill pool needs a decode pool"),
        (["--kv-bandwidth", "1GB/s"], "add --prefill-replicas 1 --decode-replicas 1"),
        ([*POOLS[:4]], "--kv-bandwidth 50GB/s"),
        ([*POOLS, "--replicas", "2"], "leave them out with --prefill-replicas"),
        ([*POOLS[:5], "fast"], "50GB/s"),
        ([*POOLS, "--overlap"], "without overlapped planning"),
        ([*POOLS, "--client-timeout", "5s"], "leave out --client-timeout"),
    ],
)
def test_pools_that_make_no_sense_are_refused(cli: Cli, wrong: list[str], error: str) -> None:
    said = cli("replay", *SHORT, *wrong)
    assert said.status in (1, 2), "status 2 is for values that an option cannot have"
    assert error in " ".join(said.err.replace("│", " ").split())
