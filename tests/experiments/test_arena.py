"""Tests of the arena on a tiny scenario, and of the committed page against the results."""

from __future__ import annotations

import math
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from factories import make_request
from typer.testing import CliRunner

from experiments.arena import __main__ as command
from experiments.arena import finalists, report
from experiments.arena.carry_over import carry_over, play_again, sample
from experiments.arena.ceilings import EVEN_STREAM, ceilings, lasting
from experiments.arena.contenders import Class, chosen, entries
from experiments.arena.figures import figures
from experiments.arena.oracle import by_all_it_takes, oracle
from experiments.arena.results import HERE, KINDS, Results
from experiments.arena.rows import knee_of
from experiments.arena.scenarios import (
    LOADS,
    SCALES,
    SCENARIOS,
    TRACES,
    MadeUp,
    Recorded,
    Scale,
    Scenario,
)
from experiments.arena.targets import FLAGSHIP, verdicts
from experiments.arena.tournament import Tournament
from slosched.core import SLO
from slosched.evaluate.capacity import Store
from slosched.evaluate.judge.promises import PROMISED, PROMISES, Mixture
from slosched.evaluate.judge.scenarios import FILE
from slosched.policy import POLICIES
from slosched.policy.kit.punctual import Supply
from slosched.policy.spec import make_policy
from slosched.workload import Tiers
from slosched.workload.lengths import Lognormal

TINY = Scale("tiny", 2, 100, 1, 120, 1, 60, 2, None, 0.25, 1, 40)
BURST = MadeUp(Lognormal(800, 1.0), Lognormal(4, 0.5), cv=1.5)
SMALL = Scenario("tiny", "h100/llama-3.1-8b", BURST, "medium")


APART = {"cost", "ceilings", "lasting", "oracle", "carried_over"}
"""Tables that are made by commands of their own."""


def tournament(folder: Path, store: Store, retuned: list[str] | None = None) -> Tournament:
    field = chosen(["edf", "goodput"])
    return Tournament(field, TINY, Results(folder), store, jobs=1, retuned=retuned)


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Play a tiny arena once: edf with and without dropping, and ours."""
    folder = tmp_path_factory.mktemp("arena")
    with Store(folder / "points.sqlite") as store:
        tournament(folder / "results", store).play(SMALL)
    return folder


def test_a_tiny_arena_leaves_every_table_of_its_own(played: Path) -> None:
    tables = Results(played / "results").tables()
    assert {kind for kind in KINDS if tables[kind]} == set(KINDS) - APART
    (run,) = tables["runs"]
    assert run["contenders"] == "edf edf+drop goodput"
    assert run["knee_of"] == "edf"
    assert run["knee_requests_per_s"] > 0
    assert {row["contender"] for row in tables["capacity"]} == {"edf", "edf+drop", "goodput"}
    assert all(row["num_trials"] <= TINY.max_trials for row in tables["tuned"])


def test_stored_results_are_carried_over_if_a_sample_comes_out_the_same(
    played: Path, tmp_path: Path
) -> None:
    shutil.copytree(played / "results", tmp_path / "results")
    results = Results(tmp_path / "results")
    runs = results.read("runs")
    results.write("runs", runs.assign(code_digest="of another day"))
    drawn = sample(results, 1, seed=0)
    replays = play_again(results, drawn, {"tiny": SMALL}, {"tiny": TINY})
    assert carry_over(results, replays, lambda _: None) == 1
    assert list(results.read("runs")["code_digest"]) == list(runs["code_digest"])
    proof = results.read("carried_over")
    assert len(proof) == 1
    assert set(proof["earlier_code"]) == {"of another day"}


def test_nothing_is_carried_over_if_a_result_differs(played: Path, tmp_path: Path) -> None:
    shutil.copytree(played / "results", tmp_path / "results")
    results = Results(tmp_path / "results")
    results.write("runs", results.read("runs").assign(code_digest="of another day"))
    (row,) = sample(results, 1, seed=0)
    row["attainment"] += 0.001
    replays = play_again(results, [row], {"tiny": SMALL}, {"tiny": TINY})
    with pytest.raises(ValueError, match="nothing is taken over"):
        carry_over(results, replays, lambda _: None)
    assert list(results.read("runs")["code_digest"]) == ["of another day"]
    assert results.read("carried_over").empty


def test_under_overload_the_same_load_is_offered_to_all(played: Path) -> None:
    tables = Results(played / "results").tables()
    knee = tables["runs"][0]["knee_requests_per_s"]
    for row in tables["overload"]:
        assert row["rate"] == pytest.approx(row["load"] * knee, rel=1e-3)
        assert row["good_requests_per_s"] == pytest.approx(
            row["rate"] * row["attainment"], rel=1e-4
        )


def test_nobody_does_better_than_a_bound(played: Path) -> None:
    rows = Results(played / "results").tables()["bounds"]
    for load in {row["load"] for row in rows}:
        here = [row for row in rows if row["load"] == load]
        least = min(row["num_good"] for row in here if row["class"] == "bound")
        assert max(row["num_good"] for row in here if row["class"] != "bound") <= least


def test_deciles_hold_all_counted_requests(played: Path) -> None:
    rows = Results(played / "results").tables()["deciles"]
    for who in ("edf", "goodput"):
        mine = [row for row in rows if row["contender"] == who and row["load"] == 1.0]
        assert [row["decile"] for row in mine] == list(range(1, 11))
        offered = sum(row["num_offered"] for row in mine)
        assert 0 < offered <= TINY.overload_requests
        assert offered >= TINY.overload_requests // 2


def test_a_second_call_finds_every_replay_and_the_same_results(played: Path) -> None:
    before = {path.name: path.read_text() for path in (played / "results").iterdir()}
    with Store(played / "points.sqlite") as store:
        again = tournament(played / "again", store)
        assert not again.is_done(SMALL)
        num_replays = 0

        def count() -> None:
            nonlocal num_replays
            num_replays += 1

        again.play(SMALL, count)
        assert again.is_done(SMALL)
    assert num_replays == 0
    for kind in set(KINDS) - {"runs"} - APART:
        assert (played / "again" / f"{kind}.csv").read_text() == before[f"{kind}.csv"]


def test_who_is_tuned_again_leaves_the_others_as_they_were(played: Path) -> None:
    before = pd.read_csv(played / "results" / "tuned.csv")
    before.loc[before.contender == "goodput", "tuned"] = "goodput:margin=0.3"
    folder = played / "retuned"
    folder.mkdir()
    before.to_csv(folder / "tuned.csv", index=False)
    with Store(played / "points.sqlite") as store:
        num_before = len(store.frame())
        tournament(folder, store, ["edf+drop"]).play(SMALL)
        policies = set(store.frame()["policy"])
        assert len(store.frame()) > num_before
    assert "goodput:margin=0.3" in policies
    after = pd.read_csv(folder / "tuned.csv")
    assert list(after.contender) == list(before.contender)
    others = before.contender != "edf+drop"
    pd.testing.assert_frame_equal(after[others], before[others])
    assert after.tuned[~others].item() == before.tuned[~others].item()


def test_the_page_of_a_tiny_arena(played: Path, tmp_path: Path) -> None:
    page = tmp_path / "arena.md"
    report.write(Results(played / "results"), page)
    text = page.read_text("utf-8")
    assert "| tiny | h100/llama-3.1-8b |" in text
    drawn = {path.stem for path in (tmp_path / "arena").glob("*.svg")}
    assert drawn == {"capacity_99", "goodput_2x", "overload", "deciles"}
    assert all(f"arena/{name}.svg" in text for name in drawn)


def test_what_lengths_and_memory_are_worth(played: Path, tmp_path: Path) -> None:
    tables = Results(played / "results").tables()
    rows = list(oracle(SMALL, TINY, tables))
    assert [row["at"] for row in rows] == ["asked", "2×"]
    assert all(0 <= row[who] <= 1 for row in rows for who in ("blind", "told", "roomy"))
    jobs = [(make_request(name, 10), 1.0) for name in ("brief", "wordy")]
    for request, _ in jobs:
        request.deadline_s = 1.5
    order = by_all_it_takes({"brief": 5, "wordy": 500}, 0.01, jobs, Supply(0.0))
    assert [[r.request_id for r in part] for part in order] == [["brief"], ["wordy"]]
    results = Results(shutil.copytree(played / "results", tmp_path / "results"))
    results.put("oracle", SMALL.name, pd.DataFrame(rows).assign(scenario=SMALL.name))
    assert "### What lengths and memory would be worth" in report.text_of(results.tables(), [])


@pytest.mark.slow
def test_the_page_says_what_bounds_a_capacity(played: Path, tmp_path: Path) -> None:
    found = pd.DataFrame(ceilings(SMALL, replace(TINY, num_windows=1)))
    rates = found.set_index(["bound", "target"])["requests_per_s"].to_dict()
    for bound in ("L1 and L2", "L5 pace"):
        assert 0 < rates[bound, 0.99] <= rates[bound, 0.9]
    assert 0 < rates[EVEN_STREAM, math.inf] < math.inf
    results = Results(shutil.copytree(played / "results", tmp_path / "results"))
    results.put("ceilings", SMALL.name, found.assign(scenario=SMALL.name))
    text = report.text_of(results.tables(), [])
    assert "### What bounds it" in text
    assert f"{rates['L5 pace', 0.99]:.3g}" in text


def test_the_page_says_what_lasting_load_leaves(played: Path, tmp_path: Path) -> None:
    tables = Results(played / "results").tables()
    rows = lasting(SMALL, TINY, knee_of(tables, SMALL.name))
    assert [row["load"] for row in rows] == list(LOADS)
    most = [row["num_good"] for row in rows]
    assert most == sorted(most, reverse=True)
    assert 0 < most[-1] < most[0] <= rows[0]["num_offered"]
    results = Results(shutil.copytree(played / "results", tmp_path / "results"))
    results.put("lasting", SMALL.name, pd.DataFrame(rows).assign(scenario=SMALL.name))
    text = report.text_of(results.tables(), [])
    assert "### What lasting load leaves possible" in text
    assert f"| tiny | 3× | {most[-1] / rows[-1]['num_offered']:.1%} |" in text
    with pytest.raises(ValueError, match="nowhere is not measured"):
        knee_of(tables, "nowhere")


def test_without_results_nothing_is_reached_and_nothing_missed(tmp_path: Path) -> None:
    empty = Results(tmp_path / "none").tables()
    assert {verdict.is_reached for verdict in verdicts(empty)} == {None}
    assert "not measured" in report.text_of(empty, [])


def test_a_verdict_is_the_worst_scenario_and_the_hardest_rival() -> None:
    tables = {kind: [] for kind in KINDS}
    tables["ratios"] = [
        ratio("conv-tight", "with dropping", 1.3),
        ratio("conv-medium", "with dropping", 1.04),
        ratio("conv-mixed", "with dropping", 1.2),
        ratio("code-medium", "with dropping", 2.0),
        ratio("conv-tight", "published", 1.2),
        ratio("code-medium", "published", 1.05),
    ]
    found = {verdict.what: verdict for verdict in verdicts(tables)}
    assert found["capacity 99%, conv-tight"].is_reached
    other = found["capacity 99%, other sets of Azure conv"]
    assert other.is_reached is False
    assert "1.04× [0.90, 2.50] over best in conv-medium" in other.found
    assert found["capacity 99%, Azure code"].is_reached
    assert found["capacity 99%, everywhere"].is_reached
    assert found["capacity 99%, everywhere, in the mean"].is_reached  # sqrt(1.2 * 1.05) > 1.1
    assert found["capacity 99%, Mooncake"].is_reached is None


def ratio(scenario: str, group: str, value: float) -> dict[str, object]:
    named = {"scenario": scenario, "metric": "capacity 99%", "ours": FLAGSHIP, "class": group}
    return {**named, "best": "best", "ratio": value, "low": 0.9, "high": 2.5}


def test_who_breaks_down_does_not_stretch_the_axis_of_ratios() -> None:
    lost = {**ratio("conv-tight", "plain", 30.0), "low": 0.0, "high": math.inf}
    tables = {"ratios": [lost], "overload": [], "deciles": []}
    [(_, figure)] = figures(tables, ["conv-tight"])
    low, high = figure.axes[0].get_xlim()
    assert 0.05 < low < 1 / 12
    assert 12 < high < 20


def test_the_committed_page_is_what_the_committed_results_give() -> None:
    if not (HERE / "runs.csv").exists():
        pytest.skip("the arena has not been run yet")
    tables = Results().tables()
    drawn = [name for name, _ in figures(tables, report.order_of(tables))]
    assert report.PAGE.read_text("utf-8") == report.text_of(tables, drawn)
    for name in drawn:
        assert (report.PAGE.parent / "arena" / f"{name}.svg").exists()


def test_every_policy_of_the_table_but_portfolio_takes_part_and_can_be_made() -> None:
    found = entries()
    missing = set(POLICIES) - {entry.policy.partition(":")[0] for entry in found}
    assert missing == {"portfolio"}
    assert [entry.name for entry in chosen(["portfolio"])] == ["portfolio"]
    assert len({entry.name for entry in found}) == len(found)
    for entry in found:
        make_policy(entry.policy)
    assert [e.name for e in found if e.group is Class.PLAIN] == ["fcfs", "sarathi", "edf", "sjf"]


def test_who_is_not_there_cannot_be_chosen() -> None:
    assert [e.name for e in chosen(["edf"])] == ["edf", "edf+drop"]
    with pytest.raises(ValueError, match="nobody is called edff"):
        chosen(["edff"])


@pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=lambda scenario: scenario.name)
def test_nobody_is_judged_on_what_he_was_tuned_on(scenario: Scenario) -> None:
    """Use the largest scale, which leaves the least distance between the two."""
    scale = max(SCALES.values(), key=_num_requests)
    if isinstance(scenario.source, Recorded) and not TRACES.exists():
        pytest.skip(f"no public traces in {TRACES}")
    source, factor = scenario.source, scenario.size_factor
    judged = source.windows(round(factor * scale.window_requests), range(scale.num_windows))
    overloaded = source.windows(
        round(factor * scale.overload_requests), range(scale.num_overload_windows)
    )
    seeds = range(-1, -1 - scale.num_tuning_windows, -1)
    tuned = source.windows(round(factor * scale.tuning_requests), seeds)
    if isinstance(source, Recorded):
        ids = [
            {r.request_id for w in windows for r in w.requests}
            for windows in (judged, overloaded, tuned)
        ]
        assert not (ids[0] | ids[1]) & ids[2]
        assert len(ids[1]) == sum(len(window) for window in overloaded)
        assert len(ids[0]) == sum(len(window) for window in judged)
    else:
        for windows in (judged, overloaded):
            drawn = [window.provenance["seed"] for window in (*windows, *tuned)]
            assert len(set(drawn)) == len(drawn)


def _num_requests(scale: Scale) -> int:
    judged = scale.num_windows * scale.window_requests
    overloaded = scale.num_overload_windows * scale.overload_requests
    return max(judged, overloaded) + scale.num_tuning_windows * scale.tuning_requests


def test_every_promise_is_told_and_a_mixture_draws_from_all() -> None:
    assert set(PROMISED) == set(PROMISES)
    rules = [Tiers((SLO(1.0, tpot),), (1.0,)) for tpot in (0.01, 0.02)]
    given = Mixture(rules, seed=3).assign([100] * 400)
    share = np.mean([slo.tpot_s == 0.01 for slo in given])
    assert 0.4 < share < 0.6
    assert given == Mixture(rules, seed=3).assign([100] * 400)


def test_the_list_names_all_and_an_unknown_scenario_is_told() -> None:
    listed = CliRunner().invoke(command.app, ["list"])
    assert listed.exit_code == 0
    assert all(name in listed.output for name in SCENARIOS)
    failed = CliRunner().invoke(command.app, ["run", "--only", "conv-tigth"])
    assert failed.exit_code != 0
    assert "conv-tigth" in str(failed.exception)


def test_the_judge_has_the_finalists_of_the_committed_results(tmp_path: Path) -> None:
    finalists.write(Results(), tmp_path / "arena.json")
    assert (tmp_path / "arena.json").read_text() == FILE.read_text()
