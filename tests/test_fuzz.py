"""`make fuzz` finds what breaks a law, keeps it small, and goes on where it stopped."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from fuzz import drawn, load, search_for

from slosched.policy import FCFS
from slosched.testing import Scenario, play, scenario_from_json, scenario_to_json


def swaps(scenario: Scenario) -> bool:
    return any(request.num_swaps for request in play(FCFS(), scenario).requests)


def fails_on_swaps(policy: str, scenario: Scenario) -> str | None:
    return "Broken: it swaps" if policy == "bad" and swaps(scenario) else None


def test_a_find_is_kept_small_and_the_search_goes_on_behind_it(tmp_path: Path) -> None:
    for _ in range(2):
        assert search_for(0.0, 1, tmp_path, ("good", "bad"), fails_on_swaps) == 1
    search = load(tmp_path / ".fuzz" / "seed-1.json")
    assert (search.num_rounds, search.finds) == (2, [])
    kept = sorted((tmp_path / "tests" / "laws").iterdir())
    assert [path.name for path in kept] == ["fuzz_bad_1000000.json", "fuzz_bad_1000001.json"]
    for path in kept:
        scenario = scenario_from_json(path.read_text(encoding="utf-8"))
        assert swaps(scenario)
        assert len(scenario.requests) <= 4, "a small one"


def test_a_scenario_is_the_same_after_writing_and_reading() -> None:
    for scenario in drawn(0, 50):
        assert scenario_from_json(scenario_to_json(scenario)) == scenario


def test_more_than_a_third_of_the_scenarios_swap() -> None:
    assert sum(map(swaps, drawn(0, 50))) > 50 / 3


def test_a_seed_means_the_same_scenarios_whatever_else_is_imported() -> None:
    program = "from fuzz import drawn; print(drawn(3, 20))"
    more = "import slosched.cli, slosched.policy, slosched.engine.server.app;"
    here = Path(__file__).parent
    said = [
        subprocess.run(
            [sys.executable, "-c", code], cwd=here, capture_output=True, text=True, check=True
        ).stdout
        for code in (program, more + program)
    ]
    assert said[0] == said[1] == f"{drawn(3, 20)}\n"
