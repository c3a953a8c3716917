"""Questions about prompts that wait have the answers that a look at each of them gives."""

from __future__ import annotations

import math
from dataclasses import dataclass
from threading import Thread

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slosched.policy.kit.quotes.lineup import Behind, Lineup
from slosched.policy.kit.quotes.work import Work

TIMES = st.sampled_from([-math.inf, 0.0, 0.5, 1.0, 2.0, math.inf])
SECONDS = st.floats(0.0, 5.0)


@dataclass(frozen=True)
class Prompt:
    place: float
    due_s: float
    num_tokens: int
    work: Work


PROMPTS = st.builds(Prompt, TIMES, TIMES, st.integers(1, 9_000), st.builds(Work, SECONDS, SECONDS))
CHANGES = st.lists(st.tuples(st.integers(0, 40), st.none() | PROMPTS, st.booleans()), max_size=200)
"""The number of a prompt, what it has become (None if it waits no longer), and whether those that
are new become columns then."""


@given(changes=CHANGES, place=TIMES, far_s=TIMES)
def test_answers_are_those_of_a_look_at_each_prompt(
    changes: list[tuple[int, Prompt | None, bool]], place: float, far_s: float
) -> None:
    lineup, waiting = Lineup[Prompt](), dict[str, Prompt]()
    for number, prompt, settles in changes:
        name = f"r{number}"
        if prompt is None:
            waiting.pop(name, None)
            lineup.remove(name)
        else:
            waiting[name] = prompt
            lineup.put(name, prompt)
        if settles:
            lineup.settle()
    assert list(lineup.all()) == list(waiting.values())
    assert all(lineup.get(name) is waiting.get(name) for name in map("r{}".format, range(41)))
    first = [p.work for p in waiting.values() if p.place <= place and p.due_s <= far_s]
    assert lineup.has_due_before(far_s) == any(p.due_s < far_s for p in waiting.values())
    assert lineup.ahead(place, far_s) == pytest.approx(
        (sum(work.alone_s for work in first), sum(work.shared_s for work in first))
    )
    by_due = sorted((p for p in waiting.values() if p.place <= place), key=lambda p: p.due_s)
    later = [p.due_s for p in by_due if 1.0 < p.due_s <= far_s]
    until = [
        sum(p.work.shared_s for p in by_due if p.due_s <= min(due_s, far_s))
        for due_s in (1.0, *later)
    ]
    laters_s, works_s = lineup.by_due(place, 1.0, far_s)
    assert laters_s.tolist() == [0.0, *(due_s - 1.0 for due_s in later)]
    assert [works_s[i] for i, x in enumerate(laters_s) if x not in laters_s[i + 1 :]] == (
        pytest.approx([until[i] for i, x in enumerate(laters_s) if x not in laters_s[i + 1 :]])
    )
    pressing = [p for p in waiting.values() if p.due_s < far_s]
    assert lineup.shared_s(far_s) == pytest.approx(sum(p.work.shared_s for p in pressing))
    behind = sorted((p for p in pressing if p.place > place), key=lambda p: p.place)
    expected = [Behind(p.work.shared_s, p.num_tokens, p.due_s) for p in behind[:3]]
    assert lineup.behind(place, far_s, most=3) == expected


def test_prompts_that_outlast_a_burst_are_still_counted() -> None:
    lineup, prompt = Lineup[Prompt](), Prompt(1.0, 1.0, 10, Work(1.0, 1.0))
    for number in range(5_000):
        lineup.put(f"r{number}", prompt)
    lineup.settle()
    for number in range(4_990):
        lineup.remove(f"r{number}")
    assert lineup.ahead(1.0, 1.0) == Work(10.0, 10.0)


def test_another_thread_may_put_prompts_and_ask() -> None:
    lineup, prompt = Lineup[Prompt](), Prompt(1.0, 1.0, 10, Work(1.0, 1.0))
    answers: list[float] = []

    def put_and_ask() -> None:
        for number in range(2_000):
            lineup.put(f"new{number}", prompt)
            answers.append(lineup.ahead(1.0, 1.0).alone_s)

    for number in range(1_000):
        lineup.put(f"old{number}", prompt)
    thread = Thread(target=put_and_ask)
    thread.start()
    for number in range(1_000):
        lineup.settle()
        lineup.remove(f"old{number}")
    thread.join()
    lineup.settle()  # what was put at the moment of the last call may have counted twice, or not
    assert len(answers) == 2_000
    assert all(0 < answer <= 3_000 for answer in answers)
    assert lineup.ahead(1.0, 1.0) == Work(2_000.0, 2_000.0)
