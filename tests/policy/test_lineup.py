"""The work that goes before a prompt, asked of columns, is that of the prompts themselves."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slosched.policy.kit.lineup import Lineup
from slosched.policy.kit.work import Work


class Prompt(NamedTuple):
    place: float
    due_s: float
    work: Work


TIMES = st.sampled_from([0.0, 0.5, 1.0, 2.0, math.inf])
PROMPTS = st.lists(
    st.builds(Prompt, TIMES, TIMES, st.builds(Work, st.floats(0.0, 5.0), st.floats(0.0, 5.0))),
    max_size=30,
)


@given(waiting=PROMPTS, added=PROMPTS, place=TIMES, far_s=TIMES)
def test_what_goes_first_is_the_sum_over_the_prompts(
    waiting: list[Prompt], added: list[Prompt], place: float, far_s: float
) -> None:
    lineup = Lineup(waiting)
    for each in added:
        lineup.add(each)
    first = [p for p in waiting + added if p.place <= place and p.due_s <= far_s]
    work = Work(sum(p.work.alone_s for p in first), sum(p.work.shared_s for p in first))
    assert lineup.ahead(place, far_s) == pytest.approx(work)
