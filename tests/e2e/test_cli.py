"""Every command, typed as a user would type it; mistakes are in test_cli_errors.py."""

from __future__ import annotations

import gzip
import json
import math
import os
import re
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from command_line import SLOSCHED, Said

import slosched
from slosched.cli.options import KVOptions
from slosched.cli.simulation import ReplicaOptions, simulate_contenders
from slosched.core import (
    EndReason,
    Limits,
    Policy,
    RequestStatus,
    SchedulerOutput,
    SchedulerView,
)
from slosched.perfmodel import (
    Profile,
    ServerTime,
    bundled_models,
    load_model,
    read_profile,
    save_model,
    write_profile,
)
from slosched.perfmodel.forms import described
from slosched.policy import FCFS, POLICIES, WRAPPERS
from slosched.policy.spec import policy_fields
from slosched.replay.files import read_records
from slosched.workload import KINDS, read_trace, synthesize

pytestmark = pytest.mark.e2e

Cli = Callable[..., Said]
TRACES = Path(__file__).parents[3] / "shared" / "traces"
PNG = b"\x89PNG\r\n\x1a\n"

LIFO = '''
from dataclasses import dataclass

from slosched.batch import BatchBuilder
from slosched.core import Policy


@dataclass
class LIFO(Policy):
    """The latest first."""

    most: int = 1000

    def schedule(self, view):
        batch = BatchBuilder(view)
        batch.add_preempting(view.running, victims=list(view.running))
        for request in (*view.swapped, *reversed(view.waiting[-self.most :])):
            if batch.preempted or batch.swapped_out:
                break
            batch.admit(request)
        return batch.build()
'''


AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.97,10,5
2023-11-16 18:17:04.97,10,5
"""


def is_png(path: Path) -> bool:
    return path.read_bytes().startswith(PNG)


def row(table: str, name: str) -> list[str]:
    """Return the cells of the row that begins with `name`."""
    (line,) = [line for line in table.splitlines() if re.match(rf"│ {re.escape(name)}\s+│", line)]
    return [cell.strip() for cell in line.strip("│").split("│")]


FEW_SEATS = ("--max-num-seqs", "8")
"""With which a bound has fewer kinds of steps to look at."""
PROFILED = Path(__file__).parents[2] / "profiling/rtx4090/llama-3.1-8b.csv"
LEFT = ("-o", "out", "--no-figures")
"""What a replay or comparison leaves without its figures, whose drawing takes the longest."""
TRACED = ("--perfetto", "trace.json")
"""A replay that leaves a trace says there how it was made, as in records.jsonl, but draws nothing."""


def facts_of_trace() -> dict[str, Any]:
    """Return how the last replay with `TRACED` was made."""
    facts: dict[str, Any] = json.loads(Path("trace.json").read_text())["otherData"]
    return facts


def test_the_installed_script_starts_and_knows_its_version() -> None:
    run = subprocess.run([SLOSCHED, "--version"], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == f"slosched {slosched.__version__}"


def test_without_a_command_it_lists_them_all(cli: Cli) -> None:
    said = cli()
    assert said.status == 2
    for command in ("profile", "fit", "serve", "replay", "compare", "policies", "trace", "demo"):
        assert re.search(rf"^  {command} ", said.err, flags=re.MULTILINE), command


@pytest.mark.parametrize(
    "command",
    [
        "profile",
        "fit",
        "serve",
        "replay",
        "compare",
        "policies",
        "demo",
        "shadow report",
        "trace show",
        "trace make",
    ],
)
def test_every_command_explains_itself(cli: Cli, command: str) -> None:
    said = cli(*command.split(), "--help")
    assert said.status == 0
    assert re.search(rf"Usage: .* {command} \[OPTIONS\]", said.out)


def test_policies_lists_every_policy_with_its_options_and_defaults(cli: Cli) -> None:
    said = cli("policies")
    assert said.status == 0
    rows = [line.split("│") for line in said.out.splitlines() if line.count("│") == 4]
    options = "".join(row[3].strip() for row in rows)  # long ones are wrapped
    for name, policy_class in (POLICIES | WRAPPERS).items():
        assert f"│ {name} " in said.out
        for option, default, _ in policy_fields(policy_class):
            assert f"{option}={default}" in options


def test_profile_lists_every_bundled_model_with_its_origin_and_error(cli: Cli) -> None:
    said = cli("profile", "--list")
    assert said.status == 0
    assert not Path("profile.csv").exists()
    lines = {line.split()[0]: line for line in said.out.splitlines() if "/" in line[:24]}
    assert sorted(lines) == bundled_models()
    for name, line in lines.items():
        model = load_model(name)
        error = model.held_out_error
        assert model.provenance["origin"] in line
        assert f" {model.form} " in line
        assert f"{error['mape']:.1f} / {error['p99']:.1f}" in line
        assert f" {int(model.provenance['kv_capacity_tokens']) // 1000}k " in line
    assert "4 × H200" in lines["h200/llama-3.1-70b-tp4"]


BUNDLED = ["h200/llama-3.1-8b", "A100/Llama-3.1-70B-TP4"]


@pytest.mark.parametrize("name", BUNDLED)
def test_replay_takes_a_bundled_model_by_its_name(cli: Cli, name: str) -> None:
    said = cli("replay", "--latency-model", name, "-n", "20", "--rate", "4", *TRACED)
    assert said.status == 0, said.err
    provenance = facts_of_trace()
    assert provenance["latency model"] == name
    assert provenance["measured origin"] == "AIConfigurator, additive"
    capacity = int(load_model(name).provenance["kv_capacity_tokens"])
    assert capacity - 16 < int(str(provenance["kv_tokens"])) <= capacity


def test_compare_takes_a_bundled_model_by_its_name(cli: Cli) -> None:
    load = ("-n", "20", "--rate", "4", *FEW_SEATS)
    said = cli("compare", "-p", "fcfs", "--latency-model", BUNDLED[1], *load, *LEFT)
    assert said.status == 0, said.err
    assert f"<dd>{BUNDLED[1]}</dd>" in Path("out/report.html").read_text()


@pytest.mark.parametrize("kind", KINDS)
def test_trace_make_writes_what_it_promises(cli: Cli, kind: str) -> None:
    said = cli(
        *("trace", "make", kind, "-n", "50", "--rate", "4", "--seed", "7"),
        *("--slo-ttft", "1s", "--slo-tpot", "50ms", "--length-scale", "0.5"),
        *("--max-prompt-tokens", "600", "--max-output-tokens", "90", "-o", "deep/er/t.csv"),
    )
    assert said.status == 0
    trace = read_trace("deep/er/t.csv")
    assert len(trace) == 50
    assert math.isclose(trace.rate, 4)
    assert {(r.slo.ttft_s, r.slo.tpot_s) for r in trace.requests} == {(1.0, 0.05)}
    assert trace.prompt_tokens.max() <= 600
    assert trace.output_tokens.max() <= 90
    assert (trace.name, trace.provenance["seed"]) == (kind, 7)


def test_a_trace_that_was_made_shows_the_same_statistics(cli: Cli) -> None:
    made = cli("trace", "make", "azure_code", "-n", "80", "-o", "t.csv")
    shown = cli("trace", "show", "t.csv")
    assert made.out == shown.out + "wrote t.csv\n"
    assert row(shown.out, "n")[1] == "80"
    assert cli("trace", "show", "t.csv", "-n", "30").out != shown.out


@pytest.mark.parametrize(
    ("file_name", "num_requests", "mean_prompt"),
    [
        ("azure_conv_2023.csv", "1.937e+04", "1,155"),
        ("mooncake_conversation.jsonl", "1.203e+04", "1.204e+04"),
    ],
)
def test_trace_show_reads_the_public_traces(
    cli: Cli, file_name: str, num_requests: str, mean_prompt: str
) -> None:
    """Their sizes and means are those that the publishers give."""
    path = TRACES / file_name
    if not path.exists():
        pytest.skip(f"the public trace {path} is not on this machine")
    said = cli("trace", "show", str(path))
    assert said.status == 0
    assert row(said.out, "n")[1] == num_requests
    assert row(said.out, "prompt_mean")[1] == mean_prompt


def test_replay_scores_a_trace_and_leaves_records_and_figures(cli: Cli) -> None:
    cli(
        "trace",
        "make",
        "azure_conv",
        "-n",
        "40",
        "--slo-tier",
        "0.5:2s/50ms",
        "--slo-tier",
        "0.5:5s/100ms",
        "-o",
        "t.csv",
    )
    said = cli(
        "replay", "--trace", "t.csv", "--policy", "edf:drop=expired,token_budget=256", "-o", "run"
    )
    assert said.status == 0
    assert "no request was promised a time" not in said.out
    trace, replay = read_trace("t.csv"), read_records(Path("run/records.jsonl"))
    assert [r.request_id for r in replay.records] == [r.request_id for r in trace.requests]
    for record, request in zip(replay.records, trace.requests, strict=True):
        if record.status is RequestStatus.FINISHED:
            assert record.num_output_tokens == request.num_output_tokens
        else:
            assert record.end_reason is EndReason.EXPIRED
    assert replay.provenance["policy"] == "edf:drop=expired,token_budget=256"
    assert replay.provenance["measured model"] == "meta-llama/Llama-3.1-8B"
    pngs = {path.stem for path in Path("run").glob("*.png") if is_png(path)}
    assert pngs == {
        *("goodput", "outcomes", "latency", "gaps", "by_prompt_length", "by_tier"),
        "timeline_edf_drop_expired_token_budget_256",
    }
    for name in pngs:
        assert ElementTree.parse(f"run/{name}.svg").getroot().tag.endswith("svg")
    assert "token_attainment" in Path("run/report.html").read_text()
    events = json.loads(gzip.decompress(Path("run/trace.perfetto.json.gz").read_bytes()))
    names = {event["name"] for event in events["traceEvents"]}
    assert {"decode", "prefill", "batch tokens", "KV cache (%)", "requests"} <= names


def test_a_replay_is_traced_where_it_is_asked_to(cli: Cli) -> None:
    said = cli("replay", "-n", "5", "--policy", "fcfs", "--perfetto", "deep/trace.json")
    assert said.status == 0, said.err
    assert "wrote deep/trace.json" in said.out
    assert "no request was promised a time" in said.out
    trace = json.loads(Path("deep/trace.json").read_text())
    assert trace["otherData"]["policy"] == "fcfs"
    finished = [e for e in trace["traceEvents"] if e.get("args", {}).get("outcome") == "good"]
    assert len(finished) == 5


def test_a_program_with_a_deadline_is_not_said_to_have_been_promised_nothing(cli: Cli) -> None:
    said = cli("replay", "--trace", "sessions", "-n", "5", "--slo-program", "1m")
    assert said.status == 0, said.err
    assert "nothing was promised" not in said.out
    assert "no request was promised a time, so every finished one is good" in said.out


def test_names_with_brackets_are_told_as_they_are(cli: Cli) -> None:
    assert "wrote t[dev].csv" in cli("trace", "make", "poisson", "-n", "5", "-o", "t[dev].csv").out
    Path("t[dev].csv").write_text(AZURE)
    words = "--trace", "t[dev].csv", "-p", "fcfs", "--no-figures", "-o", "runs[/a]"
    replayed, compared = (cli(command, *words) for command in ("replay", "compare"))
    assert replayed.status == compared.status == 0, replayed.err + compared.err
    assert "2 requests of t[dev]" in replayed.out
    assert "wrote runs[/a]/records.jsonl" in replayed.out
    assert "wrote runs[/a]/report.html" in compared.out


def test_a_figure_shows_every_name_whole(cli: Cli) -> None:
    short = "--trace", "poisson", "-n", "5", "-p", "fcfs", *FEW_SEATS
    assert cli("replay", *short, "-o", "one", "--no-figures").status == 0
    named = "--records", "_mine=one/records.jsonl", "--records", "$1 to $2=one/records.jsonl"
    assert cli("compare", *short, *named, "-o", "three").status == 0
    page = Path("three/report.html").read_text(encoding="utf-8")
    figures = re.findall("<svg.*?</svg>", page, flags=re.DOTALL)
    with_names = [figure for figure in figures if ">fcfs</text>" in figure]
    assert len(with_names) >= 5
    for figure in with_names[:5]:
        assert "_mine</text>" in figure
        assert "$1 to $2</text>" in figure


def test_the_same_seed_replays_the_same(cli: Cli) -> None:
    first, again, other = (
        cli("replay", "-n", "30", "--noise", "0.2", "--seed", seed).out for seed in ("1", "1", "2")
    )
    assert first == again != other


def test_the_same_replay_leaves_the_same_bytes(cli: Cli) -> None:
    """Check all files but the report, which tells when it was made."""
    for folder in ("a", "b"):
        assert cli("replay", "-n", "5", "--latency-model", BUNDLED[1], "-o", folder).status == 0
    names = {path.name for path in Path("a").iterdir()} - {"report.html"}
    assert {"records.jsonl", "latency.svg", "latency.png", "trace.perfetto.json.gz"} <= names
    assert [n for n in names if Path("a", n).read_bytes() != Path("b", n).read_bytes()] == []


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_a_figure_has_neither_a_date_nor_random_names(tmp_path: Path, suffix: str) -> None:
    from slosched.cli.figures import Figure, save_figure  # imports matplotlib

    figure = Figure()
    figure.subplots().plot([1, 2])
    first, again = (tmp_path / f"{name}.{suffix}" for name in "ab")
    save_figure(figure, first)
    save_figure(figure, again)
    assert first.read_bytes() == again.read_bytes()
    assert not re.search(rb"CreationDate|dc:date", first.read_bytes())


def test_a_drifting_device_changes_what_is_seen(cli: Cli) -> None:
    steady, drifting = (
        row(cli("replay", "-n", "30", "--seed", "1", *more).out, "goodput")
        for more in ([], ["--drift", "0.3"])
    )
    assert steady != drifting


def test_how_a_replica_differs_from_its_latency_model_is_told_in_the_records(cli: Cli) -> None:
    """So is the time of a decision, and whether it is hidden."""
    disturbed = ("--drift", "0.3", "--tail", "0.05", "--stall", "300ms/2s", "--bias", "1.2")
    host = ("--online", "--schedule-time", "5ms", "--overlap")
    said = cli("replay", "-n", "30", "--policy", "slo_aware", *disturbed, *host, *TRACED)
    assert said.status == 0, said.err
    found = facts_of_trace()
    assert found["stall_every_s"] == 2.0
    names = ("drift", "tail", "stall_s", "bias")
    assert [found[name] for name in names] == [0.3, 0.05, 0.3, 1.2]
    assert [found[name] for name in ("online", "schedule_s", "overlap")] == [True, 0.005, True]
    assert cli("replay", "-n", "5", *TRACED).status == 0
    found = facts_of_trace()
    assert [found[name] for name in names] == [0.0, 0.0, 0.0, 1.0]
    assert [found[name] for name in ("online", "schedule_s", "overlap")] == [False, 0.0, False]


def cached_percent(said: Said) -> float:
    """Return the share of the prompt tokens that were cached, from the last column of the table."""
    assert "cached" in said.out
    return float(row(said.out, "goodput")[-1].removesuffix("%"))


def test_what_the_prefix_cache_found_is_told(cli: Cli) -> None:
    shared = ("--trace", "sessions", "-n", "40", "--prefix-cache", "radix")
    said = cli("replay", *shared, *LEFT)
    assert said.status == 0, said.err
    assert cached_percent(said) > 0
    run = read_records(Path("out/records.jsonl"))
    assert run.provenance["prefix_cache"] == "radix"
    assert sum(record.num_cached_tokens for record in run.records) > 0
    assert run.provenance["prefix_host_tokens"] == 0
    said = cli("replay", "-n", "10", "--prefix-cache", "hash")
    assert "says nothing of shared prefixes" in said.out


def test_the_prefix_cache_evicts_in_the_order_that_is_asked_for(cli: Cli) -> None:
    agents = ("--trace", "agents", "-n", "40", "--length-scale", "0.1", "--kv-tokens", "24000")
    order = "--prefix-cache-eviction"
    said = cli("replay", *agents, "--prefix-cache", "hash", order, "belady", *TRACED)
    assert said.status == 0, said.err
    assert facts_of_trace()["prefix_cache_eviction"] == "belady"
    assert cached_percent(said) > 0
    said = cli("replay", *agents, "--prefix-cache", "radix", order, "ttl")
    assert said.status == 1
    assert "only the prefix cache hash evicts in the order ttl" in said.err
    said = cli(
        "replay", "--trace", "azure_conv", "-n", "5", "--prefix-cache", "hash", order, "belady"
    )
    assert said.status == 1
    assert "a trace that has sessions" in said.err


def test_what_the_device_evicts_is_found_in_host_memory(cli: Cli) -> None:
    short = ("--trace", "sessions", "-n", "40", "--prefix-cache", "radix", "--kv-tokens", "12288")
    host = ("--prefix-host-tokens", "200000", "--prefix-host-writes", "write_through")
    device, both = cli("replay", *short), cli("replay", *short, *host, *TRACED)
    assert (device.status, both.status) == (0, 0), both.err
    assert facts_of_trace()["prefix_host_tokens"] == 200_000
    assert facts_of_trace()["prefix_host_writes"] == "write_through"
    assert cached_percent(both) > 1.2 * cached_percent(device) > 0
    said = cli("replay", "-n", "10", *host)
    assert said.status == 1
    assert "--prefix-cache hash, merged or radix" in said.err


def test_a_prompt_that_the_kv_cache_cannot_hold_is_rejected(cli: Cli) -> None:
    Path("t.csv").write_text("arrival_s,input_tokens,output_tokens\n0,100,5\n1,2000,5\n2,100,5\n")
    said = cli("replay", "--trace", "t.csv", "--policy", "fcfs", "--kv-tokens", "1024", *LEFT)
    assert said.status == 0
    short, long, last = read_records(Path("out/records.jsonl")).records
    assert (long.status, long.end_reason) == (RequestStatus.REJECTED, EndReason.TOO_LONG)
    assert "rejected: 1 too_long\n" in said.out
    assert short.status is last.status is RequestStatus.FINISHED


def test_without_figures_a_replay_leaves_its_tables_and_records(cli: Cli) -> None:
    said = cli("replay", "-n", "5", *LEFT)
    assert said.status == 0, said.err
    assert "figures" not in said.out
    left = {"records.jsonl", "report.html", "trace.perfetto.json.gz"}
    assert {path.name for path in Path("out").iterdir()} == left
    page = Path("out/report.html").read_text()
    assert "<svg" not in page
    assert "token_attainment" in page


def test_figures_of_an_earlier_run_do_not_stay_beside_those_of_the_new_one(cli: Cli) -> None:
    shared = ("compare", "-n", "10", "--latency-model", BUNDLED[1], *FEW_SEATS, "-o", "out")
    assert cli(*shared, "-p", "fcfs", "-p", "sjf", "--no-figures").status == 0
    earlier = {f"timeline_{name}.{end}" for name in ("fcfs", "sjf") for end in ("png", "svg")}
    for name in (*earlier, "mine.png"):  # empty, since drawing takes long
        Path("out", name).touch()
    assert cli(*shared, "-p", "fcfs").status == 0
    figures = {path.name for path in Path("out").glob("*.??g")}
    assert earlier - figures == {"timeline_sjf.png", "timeline_sjf.svg"}
    assert {"goodput.png", "goodput.svg", "mine.png"} <= figures
    assert is_png(Path("out/timeline_fcfs.png"))
    assert cli(*shared, "-p", "fcfs", "--no-figures").status == 0
    assert [path.name for path in Path("out").glob("*.??g")] == ["mine.png"]


def test_a_policy_whose_spec_is_too_long_for_a_file_name_has_its_figure(cli: Cli) -> None:
    from slosched.cli.figures import _file_name  # imports matplotlib

    names = [_file_name(f"mine.py:Mine:note={'x' * 300}{i}") for i in range(2)]
    assert max(map(len, names)) <= 200
    assert names[0] != names[1]
    assert _file_name("edf:drop=expired") == "edf_drop_expired"


def test_figures_in_a_folder_without_a_report_are_not_removed(cli: Cli) -> None:
    Path("out").mkdir()
    Path("out/goodput.png").touch()
    shared = ("compare", "-n", "10", "--latency-model", BUNDLED[1], "-p", "fcfs", *LEFT)
    assert cli(*shared).status == 0
    assert Path("out/goodput.png").exists()


def test_what_a_portfolio_did_is_that_of_the_last_replay(cli: Cli) -> None:
    replay = ("replay", "-n", "5", *LEFT, "-p")
    assert cli(*replay, "portfolio").status == 0
    said = cli("replay", "-n", "5", "--no-figures", "-p", "portfolio", "-o", "a b")
    assert "slosched explain 'a b'" in said.out, "it can be typed as it is"
    assert "There was nothing to judge: no request was promised a time" in cli("explain", "out").out
    assert cli(*replay, "portfolio", "--slo-ttft", "9s").status == 0
    assert cli("explain", "out").out == (
        "The portfolio never asked: nearly all promises were kept.\n"
    )
    assert cli(*replay, "portfolio", "--slo-ttft", "1us").status == 0
    assert "though 5 of 5 promises were not kept: nobody could have" in cli("explain", "out").out
    Path("out/records.jsonl").unlink()
    assert cli("explain", "out").out == "The portfolio never asked.\n"
    assert cli(*replay, "fcfs").status == 0
    said = cli("explain", "out")
    assert said.status == 1
    assert "error: out has no evaluations.jsonl: name the folder" in said.err
    assert "error: there is no folder gone: name the folder" in cli("explain", "gone").err
    assert cli(*replay, "portfolio", "--replicas", "2").status == 0
    assert "a portfolio on one replica" in " ".join(cli("explain", "out").err.split())


def test_a_trace_of_an_earlier_replay_does_not_stay_beside_a_longer_one(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli("replay", "-n", "5", *LEFT).status == 0
    assert Path("out/trace.perfetto.json.gz").exists()
    monkeypatch.setattr("slosched.cli.commands.replay._MAX_TRACED", 5)
    assert cli("replay", "-n", "5", *LEFT).status == 0
    assert not Path("out/trace.perfetto.json.gz").exists()


def test_compare_sets_policies_side_by_side_with_recorded_ones(cli: Cli, tmp_path: Path) -> None:
    """It takes options, a policy from the current folder, a recorded replay, and what the benchmark
    of another server wrote.
    """
    lists = {"input_lens": [9, 9], "output_lens": [2, 2], "itls": [[0.02], [0.02]]}
    result = {"ttfts": [0.5, 3.0], **lists, "start_times": [5.0, 6.0], "errors": ["", ""]}
    Path("result.json").write_text(json.dumps(result))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "lifo.py").write_text(LIFO)
    assert cli("replay", "-n", "30", "--policy", "sjf", *LEFT).status == 0
    specs = ("fcfs", "slo_aware:margin=0.1,late=bind", "mine.lifo:LIFO:most=3")
    said = cli(
        *("compare", "-n", "30", "--rate", "8", "--slo-ttft", "1s", "--slo-tpot", "50ms"),
        *(word for spec in specs for word in ("-p", spec)),
        *("--records", "before=out/records.jsonl", "--records", "vllm=result.json"),
        *FEW_SEATS,
        *("-o", "compared"),
    )
    assert said.status == 0, said.err
    assert row(said.out, "fcfs")[2].endswith("%")
    assert row(said.out, "before")[2].endswith("%")
    assert row(said.out, "vllm")[1:3] == ["0.5", "50.0%"]
    assert float(row(said.out, "fcfs")[-1].removesuffix("%")) <= 100
    for shown in (said.out, Path("compared/report.html").read_text()):
        told = "Promised: TTFT 1 s (some have none), TPOT 50 ms (some have none)."
        assert told in " ".join(shown.split())
    assert row(said.out, "before")[-1] == "-", "it may have been another trace"
    assert "No scheduler serves more than" in said.out
    assert "before has other SLOs than the simulated" in said.out
    page = Path("compared/report.html").read_text()
    for text in (*specs, "before", "mean_tpot", "rtx4090/llama-3.1-8b", "<dt>seed</dt>"):
        assert text in page, text
    assert page.count("<svg") == 5 + len(specs)  # a recorded replay has no steps to draw
    assert not re.search(r'(src|href)="(?!#)', page), "it loads from elsewhere"
    assert sum(is_png(path) for path in Path("compared").glob("*.png")) == 5 + len(specs)


def test_compare_judges_a_trace_by_its_own_slos_unless_others_are_asked_for(cli: Cli) -> None:
    """As `replay` does; the promise that `compare` has by default is for traces without SLOs."""
    hopeless = ("--slo-ttft", "0.1ms", "--slo-tpot", "0.1ms", "-o", "hopeless.jsonl")
    assert cli("trace", "make", "azure_code", "-n", "6", "--rate", "1", *hopeless).status == 0
    trace = ("--trace", "hopeless.jsonl", "-p", "fcfs", *FEW_SEATS)
    own = cli("compare", *trace, *LEFT)
    assert own.status == 0, own.err
    assert row(own.out, "fcfs")[2] == row(cli("replay", *trace).out, "fcfs")[2] == "0.0%"
    assert "each request is judged by its own SLO, which azure_code has" in own.out
    other = cli("compare", *trace, "--slo-ttft", "1m", "--slo-tpot", "10s", *LEFT)
    assert row(other.out, "fcfs")[2] == "100.0%"
    assert "judged by its own SLO" not in other.out


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("--slo-ttft 2s", "Promised: TTFT 2 s, no TPOT."),
        ("--slo-ttft 3x", "no TPOT."),
        ("--slo-tpot 40ms", "Promised: no TTFT, TPOT 40 ms."),
        ("--slo-ttft 2s --slo-tpot 40ms", "Promised: TTFT 2 s, TPOT 40 ms."),
    ],
)
@pytest.mark.parametrize("command", ["replay", "compare"])
def test_every_command_promises_just_what_it_is_given(
    cli: Cli, command: str, given: str, says: str
) -> None:
    said = cli(
        command, "-p", "fcfs", "--trace", "poisson", "-n", "5", *given.split(), "--no-figures"
    )
    assert said.status == 0, said.err
    assert says in said.out


def test_compare_promises_the_usual_times_if_it_is_given_none(cli: Cli) -> None:
    said = cli("compare", "-p", "fcfs", "--trace", "poisson", "-n", "5", "--no-figures")
    assert "Promised: TTFT 1 s, TPOT 50 ms." in said.out


def test_compare_keeps_what_others_did_where_a_policy_fails(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text(
        "from slosched.core import Policy\n\n\n"
        "class Fails(Policy):\n"
        "    def schedule(self, view):\n"
        "        raise RuntimeError('out of ideas')\n"
    )
    said = cli("compare", "-n", "5", "-p", "fails:Fails", "-p", "fcfs", *FEW_SEATS, *LEFT)
    assert said.status == 1
    assert re.search(r"│ fcfs .* 100.0% │", said.out)
    why = "fails.py, line 6, in schedule: RuntimeError: out of ideas"
    assert "fails:Fails was given up" in said.out
    assert why in (Path("out") / "report.html").read_text()
    said = cli("compare", "-n", "5", "-p", "fails:Fails", *FEW_SEATS, *LEFT)
    assert said.status == 1
    assert why in said.complaint


def test_ctrl_c_keeps_the_policies_that_are_done() -> None:
    class Stopped(Policy):
        def schedule(self, view: SchedulerView) -> SchedulerOutput:
            raise KeyboardInterrupt

    replica = ReplicaOptions().open(Limits(), KVOptions(), seed=0)
    trace = synthesize("poisson", num_requests=3)
    done = simulate_contenders(trace, {"a": (FCFS(), replica), "b": (Stopped(), replica)})
    assert done.stopped
    assert list(done.outcomes) == ["a"]
    with pytest.raises(KeyboardInterrupt):
        simulate_contenders(trace, {"b": (Stopped(), replica)})


def test_compare_gives_no_bound_that_luck_could_beat(cli: Cli) -> None:
    tiers = ("--slo-tier", "0.5:1s/50ms", "--slo-tier", "0.5:5s/100ms")
    said = cli("compare", "-n", "10", "-p", "fcfs", "--noise", "0.1", *tiers, *FEW_SEATS, *LEFT)
    assert said.status == 0, said.err
    assert "No bound on every scheduler is given" in said.out
    assert "noise 0.1" in said.out
    assert "÷" not in said.out


@pytest.mark.slow
def test_compare_takes_all_policies_by_default(cli: Cli) -> None:
    said = cli("compare", "-n", "4", "--trace", "poisson")
    assert said.status == 0
    firsts = [line.split("│")[1].strip() for line in said.out.splitlines() if line[:1] == "│"]
    assert "".join(firsts) == "".join(POLICIES)  # a long name is folded
    assert Path("runs/compare/report.html").is_file()


PROFILE = (
    *("profile", "-m", "tiny-random", "--threads", "1", "--time-limit", "30s"),
    *("--max-num-seqs", "8", "--max-num-batched-tokens", "128", "--max-context-tokens", "256"),
    *("--kv-tokens", "4096"),
)


def test_profile_then_fit_then_replay_on_the_fitted_device(cli: Cli) -> None:
    """The model has random weights and is measured on this machine in seconds."""
    said = cli(*PROFILE, "--batches", "40", "--passes", "2", "-o", "p.csv")
    assert said.status == 0, said.err
    profile = read_profile(Path("p.csv"))
    assert f"wrote p.csv: {len(profile.measurements)} steps of" in said.out
    assert {m.regime for m in profile.measurements} == {"decode", "prefill", "mixed", "swap"}
    assert profile.provenance["model"] == "tiny-random"

    said = cli("fit", "p.csv", "-o", "m.json", "--plot", "fit.png")
    assert said.status == 0, said.err
    model = load_model("m.json")
    assert row(said.out, "held out")[2] == f"{model.held_out_error['mape']:.1f}"
    assert row(said.out, model.form)[2] == row(said.out, "held out")[2]
    assert is_png(Path("fit.png"))

    said = cli("fit", "p.csv", "-o", "linear.json", "--form", "linear")
    assert said.status == 0, said.err
    assert load_model("linear.json").form == "linear"
    # On a busy machine the fitted constant may come out as zero.
    assert float(row(said.out, "C7 constant")[1].removesuffix(" µs").replace(",", "")) >= 0

    said = cli(
        *("replay", "-n", "10", "--length-scale", "0.05", "--latency-model", "m.json"), *LEFT
    )
    assert said.status == 0, said.err
    replay = read_records(Path("out/records.jsonl"))
    assert replay.provenance["kv_tokens"] == 4096, "the cache that was profiled"
    assert all(r.status is RequestStatus.FINISHED for r in replay.records)


def test_a_profile_in_milliseconds_is_fitted_with_a_note(cli: Cli) -> None:
    rows = read_profile(PROFILED)
    write_profile(
        Profile(tuple(replace(m, seconds=1000 * m.seconds) for m in rows.measurements)),
        Path("ms.csv"),
    )
    said = cli("fit", "ms.csv", "-o", "m.json", "--form", "linear")
    assert said.status == 0, said.err
    assert "note: ms.csv: no step of at most 64 tokens took less than 16.34 s" in said.out
    assert "0.0125, not 12.5" in said.out
    assert "note: " not in cli("fit", str(PROFILED), "-o", "m.json", "--form", "linear").out


def test_profile_goes_on_where_it_stopped_and_spares_the_files_of_others(cli: Cli) -> None:
    path = Path("p.csv")
    plan = (*PROFILE, "--batches", "12", "--passes", "1", "-o", str(path))
    assert cli(*plan).status == 0
    whole = read_profile(path)
    first_rows = path.read_text().splitlines()[:7]
    path.write_text("\n".join(first_rows) + "\n")

    said = cli(*plan)
    assert said.status == 0, said.err
    assert "p.csv holds 5 rows of this plan: going on" in said.out
    assert path.read_text().splitlines()[:7] == first_rows
    assert [m.chunks for m in read_profile(path).measurements] == [
        m.chunks for m in whole.measurements
    ]

    kept = path.read_text()
    for other, name in (("--seed", "plan"), ("--block-size", "block_size")):
        said = cli(*plan, other, "8")
        assert said.status == 1
        assert f"p.csv is a profile with another {name}" in said.complaint
        assert "--overwrite" in said.complaint
    assert path.read_text() == kept
    path.write_text(kept.replace("tiny-random", "my-model"))
    said = cli(*plan, "--block-size", "8")
    assert "p.csv is a profile with another model ('my-model', now 'tiny-random')" in said.complaint
    path.write_text(kept)
    assert cli(*plan, "--seed", "8", "--overwrite").status == 0
    assert "seed 8" in read_profile(path).provenance["plan"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_profile_goes_on_with_the_type_with_which_it_began(cli: Cli, dtype: str) -> None:
    """Which of the two is faster here differs from start to start where both are about as fast."""
    plan = (*PROFILE, "--batches", "12", "--passes", "1", "--no-server", "-o", "p.csv")
    assert cli(*plan, "--dtype", dtype).status == 0
    said = cli(*plan)
    assert said.status == 0, said.err
    assert f"tiny-random on cpu in {dtype}" in said.out
    assert "going on" in said.out


def test_a_single_request_has_no_rate(cli: Cli) -> None:
    said = cli("compare", "-n", "1", "-p", "fcfs", *LEFT)
    assert said.out.splitlines()[1].rstrip() == "1 request of azure_conv"
    assert "nan/s" not in Path("out/report.html").read_text()


def test_output_into_a_file_holds_no_terminal_codes() -> None:
    environment = {**os.environ, "TERM": "xterm-256color"}
    run = subprocess.run(
        [SLOSCHED, "replay", "-n", "5"], capture_output=True, text=True, check=True, env=environment
    )
    assert "\x1b" not in run.stdout + run.stderr
    assert row(run.stdout, "goodput")[2] == "100.0%"


def test_output_in_ascii_has_question_marks_where_it_lacks_a_character(tmp_path: Path) -> None:
    words = (SLOSCHED, "compare", "-n", "5", "-p", "fcfs", "-o", str(tmp_path), "--no-figures")
    narrow = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(words, env=narrow, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "wrote" in done.stdout
    assert "÷" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_a_servers_times_are_the_models_unless_they_are_typed(cli: Cli) -> None:
    model = load_model("h100/llama-3.1-8b")
    times = ServerTime(0.009, 0.0003, 0.001)
    save_model(described(model, {}, {}, server_time=times, noise=0.05), Path("model.json"))
    names = ("per_request_s", "per_step_device_s", "per_step_host_s", "schedule_s", "noise")

    def used(*typed: str) -> list[object]:
        said = cli("replay", "-n", "5", "--latency-model", "model.json", *typed, *TRACED)
        assert said.status == 0, said.err
        provenance = facts_of_trace()
        return [provenance[name] for name in names]

    assert used() == [0.009, 0.0003, 0.001, 0.0, 0.05]
    assert used("--overlap") == [0.009, 0.0003, 0.001, 0.001, 0.05]
    assert used("--server-time", "0", "--noise", "0") == [0.0, 0.0, 0.0, 0.0, 0.0]
    typed = ("--server-time", "5ms,1ms", "--schedule-time", "2ms")
    assert used(*typed) == [0.005, 0.001, 0.002, 0.0, 0.05]
    assert used("--schedule-time", "measured")[2:4] == [0.0, "measured"]
    typed = ("--server-time", "0ms,1ms,0s", "--schedule-time", "0")
    assert used(*typed) == [0.0, 0.001, 0.0, 0.0, 0.05]


def test_late_turns_of_programs_are_served_unless_they_are_to_be_rejected(cli: Cli) -> None:
    agents = ("--trace", "agents", "-n", "60", "--length-scale", "0.1", "--rate", "20")
    promised = ("--slo-ttft", "200ms", "--slo-tpot", "50ms", "--slo-program", "2x")
    asked = (*agents, *promised, "--policy", "edf:drop=infeasible")
    served, rejected = cli("replay", *asked), cli("replay", *asked, "--on-infeasible", "reject")
    assert (served.status, rejected.status) == (0, 0), served.err
    assert "relegated: " in served.out
    assert "relegated" not in rejected.out
    assert "rejected: " in rejected.out
