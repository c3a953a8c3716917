"""Look for scenarios on which a policy breaks a law: `make fuzz MINUTES=5 SEED=1`.

Every policy that the laws are tested with plays the same random scenarios, round after round.  The
place is kept in `.fuzz/`, so that the next call with the same seed goes on there.  When the time is
up the finds are made small and go to `tests/laws/`, from where the tests play them from then on.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import hypothesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Flaky
from law_variants import LEAVES_ROOM, VARIANTS

from slosched.testing import (
    Scenario,
    check_laws,
    scenario_from_json,
    scenario_to_json,
    scenarios,
)

ROOT = Path(__file__).parents[1]
NUM_SCENARIOS = 10
"""The number of scenarios that each policy plays in a round."""

BrokenLaw = Callable[[str, Scenario], str | None]


@dataclass(frozen=True)
class Find:
    """A policy that breaks a law, on which scenario, and what was raised."""

    policy: str
    round_seed: int
    error: str
    scenario: str
    """The scenario as JSON."""


@dataclass
class Search:
    """The progress of the search with one seed."""

    num_rounds: int = 0
    finds: list[Find] = field(default_factory=list)
    """Finds that are not yet in `tests/laws`, at most one for each policy."""


def load(path: Path) -> Search:
    """Return the search that was saved at `path`, or a new one."""
    if not path.exists():
        return Search()
    fields = json.loads(path.read_text(encoding="utf-8"))
    return Search(fields["num_rounds"], [Find(**find) for find in fields["finds"]])


def save(search: Search, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(search), indent=1), encoding="utf-8")


def play_all(
    seed: int,
    num_scenarios: int,
    play: Callable[[Scenario], None],
    phases: Sequence[Phase] = (Phase.generate,),
) -> None:
    """Play random scenarios, the same for the same seed."""

    @hypothesis.seed(seed)
    @settings(
        max_examples=num_scenarios,
        deadline=None,
        database=None,
        derandomize=False,
        phases=phases,
        suppress_health_check=list(HealthCheck),
    )
    @given(scenarios())
    def each(scenario: Scenario) -> None:
        play(scenario)

    each()


def drawn(seed: int, num_scenarios: int) -> list[Scenario]:
    """Return random scenarios, the same for the same seed."""
    found: list[Scenario] = []
    play_all(seed, num_scenarios, found.append)
    return found


def broken_law(policy: str, scenario: Scenario) -> str | None:
    """Return what was raised when the policy of this name played the scenario, if anything."""
    try:
        check_laws(VARIANTS[policy], scenario, conserves_work=policy not in LEAVES_ROOM)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def run_round(search: Search, seed: int, policies: Sequence[str], broken: BrokenLaw) -> None:
    """Let the policies without a find play a round, and add the laws that they break."""
    round_seed = seed * 1_000_000 + search.num_rounds
    found = {find.policy for find in search.finds}
    round_scenarios = drawn(round_seed, NUM_SCENARIOS)
    for policy in policies:
        for scenario in () if policy in found else round_scenarios:
            if (error := broken(policy, scenario)) is not None:
                find = Find(policy, round_seed, error, scenario_to_json(scenario))
                search.finds.append(find)
                break
    search.num_rounds += 1


class _StillBrokenError(Exception):
    """The error for which hypothesis searches the smallest scenario."""


def smallest(find: Find, broken: BrokenLaw) -> Scenario:
    """Return the smallest scenario like the one found on which the same type of error is raised."""
    kind = find.error.partition(":")[0]
    last = [scenario_from_json(find.scenario)]

    def play(scenario: Scenario) -> None:
        if (broken(find.policy, scenario) or "").partition(":")[0] == kind:
            last[0] = scenario  # hypothesis ends with the smallest one
            raise _StillBrokenError

    with suppress(_StillBrokenError, Flaky):
        play_all(find.round_seed, NUM_SCENARIOS, play, (Phase.generate, Phase.shrink))
    return last[0]


def keep(find: Find, folder: Path, broken: BrokenLaw) -> Path:
    """Write the smallest scenario like the one found to the folder whose files the tests play."""
    name = "".join(c if c.isalnum() else "_" for c in find.policy)
    path = folder / f"fuzz_{name}_{find.round_seed}.json"
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(scenario_to_json(smallest(find, broken)) + "\n", encoding="utf-8")
    return path


def search_for(
    minutes: float,
    seed: int,
    root: Path = ROOT,
    policies: Sequence[str] = tuple(VARIANTS),
    broken: BrokenLaw = broken_law,
) -> int:
    """Play whole rounds until the time is up; return how many finds were kept."""
    place = root / ".fuzz" / f"seed-{seed}.json"
    search, ends_s = load(place), time.monotonic() + 60 * minutes
    first = search.num_rounds
    while search.num_rounds == first or time.monotonic() < ends_s:
        run_round(search, seed, policies, broken)
        save(search, place)
    num_played = NUM_SCENARIOS * (search.num_rounds - first)
    say(f"seed {seed}, rounds {first} to {search.num_rounds - 1}: {num_played} scenarios")
    num_kept = len(search.finds)
    while search.finds:
        path = keep(search.finds[-1], root / "tests" / "laws", broken)
        say(f"{search.finds[-1].policy} breaks a law on {path}: {search.finds[-1].error}")
        search.finds.pop()
        save(search, place)
    return num_kept


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=5.0, help="how long to search (5)")
    parser.add_argument("--seed", type=int, default=1, help="which scenarios to play (1)")
    options = parser.parse_args()
    return min(1, search_for(options.minutes, options.seed))


if __name__ == "__main__":
    sys.exit(main())
