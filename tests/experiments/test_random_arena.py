"""Tests of the arena of random cells: its draws, a tiny cell from end to end, and its page."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from experiments.arena.contenders import Class
from experiments.random_arena import again, report, results
from experiments.random_arena.cells import Cell, draw, keepable, num_for
from experiments.random_arena.contenders import contenders
from experiments.random_arena.play import Effort, Match, Stage
from experiments.random_arena.results import Row
from experiments.random_arena.workloads import UNKEEPABLE_TPOT_S
from slosched.core import SLO
from slosched.workload import Trace, TraceRequest

EASY = Cell(
    0,
    0,
    model="h100/llama-3.1-8b",
    requests="bursts",
    first_window=0,
    promise="medium",
    rule="mean_tpot",
    unkeepable_one_in=10,
    kv_divisor=1,
    heavy_tail=False,
    prefix_cache=False,
    model_error="none",
)
NAMES = {"goodput", "edf+drop", "slo_aware"}


@pytest.fixture(scope="module")
def row() -> Row:
    entries = [entry for entry in contenders(portfolio=False) if entry.name in NAMES]
    effort = Effort(2, 1, window_requests=24, most_window_requests=24)
    return Match(EASY, entries, effort).row()


def test_the_same_seed_gives_the_same_cells() -> None:
    cells = [draw(5, number) for number in range(40)]
    assert cells == [draw(5, number) for number in range(40)]
    assert cells != [draw(6, number) for number in range(40)]
    assert len({cell.model for cell in cells}) > 10


def test_cells_differ_in_all_that_is_drawn() -> None:
    cells = [draw(5, number) for number in range(60)]
    for name in Cell.__dataclass_fields__:
        if name != "seed":
            assert len({getattr(cell, name) for cell in cells}) > 1, name


def test_windows_that_tune_share_no_request_with_those_that_judge() -> None:
    cell = replace(EASY, requests="azure_conv")
    device = cell.device()
    judging = [[r.num_prompt_tokens for r in w.requests] for w in cell.windows(device, 50)]
    tuning = [[r.num_prompt_tokens for r in w.requests] for w in cell.tuning_windows(device, 50)]
    assert all(len(part) == 16 for part in tuning)
    assert not any(
        part == whole[i : i + 16] for part in tuning for whole in judging for i in range(35)
    )


def test_a_window_lasts_for_twice_the_time_that_its_requests_may_take() -> None:
    promised = EASY.windows(EASY.device(), 40)[0].with_slo(SLO(5.0, 0.1))
    mean_s = 5.0 + 0.1 * (promised.output_tokens.mean() - 1)
    assert num_for(promised, 10.0) == pytest.approx(20.0 * mean_s, abs=1)


@pytest.mark.parametrize(("most", "expected"), [(24, 24), (60, 60)])
def test_windows_of_a_fast_device_have_more_requests_up_to_a_limit(
    most: int, expected: int
) -> None:
    entries = [entry for entry in contenders(portfolio=False) if entry.name in NAMES]
    effort = Effort(window_requests=24, most_window_requests=most)
    assert Match(EASY, entries, effort).window_requests == expected


def test_requests_that_no_idle_device_keeps_do_not_count() -> None:
    device = EASY.device()
    (window, *_) = EASY.windows(device, 40)
    impossible = np.array([r.slo.tpot_s == UNKEEPABLE_TPOT_S for r in window.requests])
    longer = window.output_tokens > 1
    assert impossible.sum() == 4
    judged = keepable(window, device, EASY.config(device))
    assert not (judged & impossible & longer).any()
    assert judged[~impossible].all()


def test_a_tiny_cell_has_capacities_and_ratios_to_the_best_of_each_class(row: Row) -> None:
    assert "void" not in row
    assert 0.85 < row["share_judged"] < 0.95
    assert {r["contender"] for r in row["capacity"]} == NAMES
    assert {(r["metric"], r["class"], r["ours"]) for r in row["ratios"]} == {
        (metric, group.value, "goodput")
        for metric in report.METRICS
        for group in (Class.DROPPING, Class.PUBLISHED)
    }
    for ratio in row["ratios"]:
        if not math.isnan(ratio["ratio"]):
            assert ratio["ratio"] == pytest.approx(ratio["of_ours"] / ratio["of_best"])
    best = max(r["requests_per_s"] for r in row["capacity"] if r["target"] == 0.9)
    (rate,) = {r["rate"] for r in row["overload"]}
    assert rate == pytest.approx(2 * best, rel=1e-3)


def test_overload_lasts_and_does_not_count_the_last_window_of_each_replay() -> None:
    cell = replace(EASY, requests="mooncake_conv", prefix_cache=True)
    device = cell.device()
    short = Stage.of(cell.windows(device, 20), device, cell.config(device))
    lasting = short.in_lasting_overload()
    for first, (window, judged) in enumerate(zip(lasting.windows, lasting.judged, strict=True)):
        assert len(window) == 60
        assert window.rate == pytest.approx(1.0)
        expected = [
            r.num_prompt_tokens for i in range(3) for r in short.windows[(first + i) % 3].requests
        ]
        assert [r.num_prompt_tokens for r in window.requests] == expected
        assert not judged[40:].any()
        assert (judged[:20] == short.judged[first]).all()
    hashes = [{h for r in part for h in r.prefix_hashes} for part in _thirds(lasting.windows[0])]
    assert all(hashes)
    assert not hashes[0] & hashes[1]


def _thirds(trace: Trace) -> list[Sequence[TraceRequest]]:
    return [trace.requests[i : i + 20] for i in (0, 20, 40)]


def test_a_policy_that_plays_a_stored_cell_again_has_the_stored_result(row: Row) -> None:
    for stored in row["overload"]:
        *_, overload = again.lines(row, row["settings"][stored["policy"]])
        assert overload[1] == "overload"
        assert overload[-1] == f"{stored['attainment']:.1%}"
    assert list(again.lines(row)) == list(again.lines(row, row["settings"]["goodput"]))


def test_an_overload_that_lasts_is_told_apart_from_a_stored_one_that_did_not(row: Row) -> None:
    former = {key: value for key, value in row.items() if key != "overload_requests"}
    short, lasting = list(again.lines(former))[-2:]
    assert (short[1], lasting[1]) == ("overload", "overload that lasts")
    assert lasting[-1] == list(again.lines(row))[-1][-1]


def test_a_stored_cell_whose_trace_is_not_there_is_not_played(row: Row) -> None:
    with pytest.raises(ValueError, match=r"cell 0\.0 was played on azure_code_2023, and here is"):
        list(again.lines({**row, "source": "azure_code_2023"}))


def test_a_cell_says_why_nothing_was_found() -> None:
    entries = [entry for entry in contenders(portfolio=False) if entry.name in NAMES]
    cell = replace(EASY, unkeepable_one_in=1)
    row = Match(cell, entries, Effort(window_requests=10, most_window_requests=10)).row()
    assert row["void"] == "an idle device keeps no promise of some window"
    assert "ratios" not in row


def test_an_interrupted_run_goes_on_with_the_cells_that_are_missing(
    row: Row, tmp_path: Path
) -> None:
    path = tmp_path / "results.jsonl"
    results.append(row, path)
    results.append({**row, "name": "0.1"}, path)
    with path.open("a") as file:
        file.write('{"name": "0.2", "cell"')
    found = results.read(path)
    assert [each["name"] for each in found] == ["0.0", "0.1"]
    assert results.done(found, row["contenders"], row["code_digest"]) == {"0.0", "0.1"}
    assert not results.done(found, row["contenders"], "other code")


def test_a_cell_that_is_played_again_takes_the_place_of_its_former_result(
    row: Row, tmp_path: Path
) -> None:
    path = tmp_path / "results.jsonl"
    results.append(row, path)
    results.append({**row, "cpu_s": -1.0}, path)
    assert [each["cpu_s"] for each in results.read(path)] == [-1.0]


def test_the_page_counts_cells_and_names_those_where_ours_is_behind(row: Row) -> None:
    cell = {**row["cell"], "seed": report.REPORT_SEED}
    base = json.loads(json.dumps(row))
    behind = {"ratio": 0.5, "low": 0.4, "high": 0.6, "of_ours": 1.0, "of_best": 2.0}
    ahead = {"ratio": 2.0, "low": 1.5, "high": 2.5, "of_ours": 2.0, "of_best": 1.0}
    rows = [
        {**base, "name": name, "cell": cell, "ratios": [{**r, **facts} for r in base["ratios"]]}
        for name, facts in (("2.0", behind), ("2.1", ahead))
    ]
    rows.append({"name": "2.2", "cell": cell, "void": "nobody", **_made(base)})
    page = report.text(rows, has_figure=False)
    assert "3 cells have been played, of which 1 say nothing (2.2" in page
    assert "| capacity 99% | published | 2 | 1.00 | 0.50 | 2.0 | 1 | 1 | 0 | 0 |" in page
    assert "| 2.0 | capacity 99% | 1 | `slo_aware`: 2 | 0.50* | 0.40 to 0.60 |" in page
    assert "| 2.1 | capacity 99%" not in page


def test_the_page_counts_the_capacities_to_be_read_with_care(row: Row) -> None:
    cell = {**row["cell"], "seed": report.REPORT_SEED}
    flags = (["short", "queue grows"], ["short"], ["unreachable"], [])
    capacity = [{**row["capacity"][0], "flags": each} for each in flags]
    page = report.text([{**row, "cell": cell, "capacity": capacity}], has_figure=False)
    assert "Of the 3 capacities that were found in these cells, 2 are of replays" in page
    assert "and at 1 the queue still grew" in page


def _made(row: Row) -> Row:
    names = ("source", "contenders", "cpu_s", "code_digest", "git_hash", "command", "machine")
    return {name: row[name] for name in (*names, "made")}


def test_the_committed_page_is_made_of_the_committed_results() -> None:
    rows = results.read()
    if not rows:
        pytest.skip("no cell has been played yet")
    has_figure = "random_arena/ratios.svg" in report.PAGE.read_text("utf-8")
    assert report.PAGE.read_text("utf-8") == report.text(rows, has_figure=has_figure)
