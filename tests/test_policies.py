"""Every policy, with many options, obeys the laws of `slosched.testing`."""

from __future__ import annotations

from pathlib import Path

import pytest
from law_variants import LEAVES_ROOM, PAYS_FOR_UNKEEPABLE, VARIANTS

from slosched.policy import POLICIES
from slosched.policy.spec import make_policy
from slosched.testing import (
    Broken,
    LawBrokenError,
    check_laws,
    check_others_unharmed,
    check_policy,
    scenario_from_json,
)

FOUND = sorted((Path(__file__).parent / "laws").glob("*.json"))
"""Scenarios on which a law broke once."""


def check(name: str, max_examples: int) -> None:
    conserves_work = name not in LEAVES_ROOM
    check_policy(VARIANTS[name], max_examples=max_examples, conserves_work=conserves_work)


@pytest.mark.parametrize("name", VARIANTS)
def test_the_policy_obeys_the_laws(name: str) -> None:
    check(name, max_examples=12 if name in POLICIES else 6)


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_the_policy_obeys_the_laws_in_many_more_scenarios(name: str) -> None:
    check(name, max_examples=400)


@pytest.mark.parametrize("name", LEAVES_ROOM)
def test_who_is_excused_does_leave_room(name: str) -> None:
    with pytest.raises(LawBrokenError, match="has room for"):
        check_policy(VARIANTS[name], max_examples=60, shrink=False)


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("path", FOUND, ids=lambda path: path.stem)
def test_no_law_breaks_where_one_once_did(path: Path, name: str) -> None:
    scenario = scenario_from_json(path.read_text(encoding="utf-8"))
    check_laws(VARIANTS[name], scenario, conserves_work=name not in LEAVES_ROOM)


UNHARMED = [name for name in POLICIES if name not in PAYS_FOR_UNKEEPABLE]


@pytest.mark.parametrize(
    ("shares", "parts"),
    [
        ((0.1,), (Broken.TTFT, Broken.TPOT)),
        pytest.param((0.1,), (Broken.BOTH,), marks=pytest.mark.slow),
        pytest.param((0.01, 0.5), tuple(Broken), marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("spec", [*UNHARMED, "goodput+door:refuse=unkeepable"])
def test_nobody_pays_for_a_promise_that_cannot_be_kept(
    spec: str, shares: tuple[float, ...], parts: tuple[Broken, ...]
) -> None:
    check_others_unharmed(lambda: make_policy(spec), shares=shares, parts=parts)


@pytest.mark.parametrize("spec", PAYS_FOR_UNKEEPABLE)
def test_who_is_excused_does_let_others_pay(spec: str) -> None:
    with pytest.raises(LawBrokenError, match="cannot be kept"):
        check_others_unharmed(lambda: make_policy(spec))
