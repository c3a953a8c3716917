"""slosserve's dynamic program against sets counted by hand, and against all possible sets.

As in `test_slosserve.py`, a step of 50 ms with 100 decodes banks 800 tokens for prompts, 16,000 a
second, and every further decode takes one token of each step.
"""

from __future__ import annotations

from functools import partial
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from views import FLAT, R, view_of

from slosched.core import SLO, EndReason, Limits, SchedulerOutput
from slosched.policy.kit.lengths import Floats, OutputLengths
from slosched.policy.published.slosserve.best_subset import best_subset
from slosched.policy.published.slosserve.policy import Admission, SLOsServe
from slosched.policy.published.slosserve.promised_load import PromisedLoad
from slosched.simulator.simulate import SimulationConfig, simulate
from slosched.workload import Trace, TraceRequest

DECODES = [R(f"d{i}", 100, due_s=0.05, out=1) for i in range(100)]
LONG, EARLY, LATE = R("long", 6000, 0.4), R("early", 3000, 0.45), R("late", 3500, 0.5)
make_dp = partial(SLOsServe, Admission.DP, margin=0)


def decide(requests: list[R], **options: float) -> SchedulerOutput:
    return make_dp().schedule(view_of(requests, **options))  # type: ignore[arg-type]


def test_two_later_prompts_are_worth_more_than_an_early_long_one() -> None:
    """The bank: 6,400 tokens by 0.4 s, 7,200 by 0.45 s, 8,000 by 0.5 s.

    | after | sets, with what they use of it then |
    |---|---|
    | long | none 0; long 6,000 |
    | early | none 0; early 3,000, which is less than long's 6,001; both, 9,001, are too many |
    | late | none 0; early 3,001; early and late 6,501; late alone, 3,500, is more than early |
    """
    queue = [*DECODES, LONG, EARLY, LATE]
    assert decide(queue).rejected == {"long": EndReason.INFEASIBLE}
    by_simulation = SLOsServe(margin=0)
    assert by_simulation.schedule(view_of(queue)).rejected.keys() == {"early", "late"}


@pytest.mark.parametrize(("tokens", "refused"), [(4990, {"long"}), (5010, {"long", "late"})])
def test_who_uses_least_is_taken_where_no_more_than_one_can_be(
    tokens: int, refused: set[str]
) -> None:
    """Early leaves 8,000 - 3,001 tokens for late."""
    assert set(decide([*DECODES, LONG, EARLY, R("late", tokens, 0.5)]).rejected) == refused


@pytest.mark.parametrize(("due_s", "is_admitted"), [(0.49, False), (0.51, True)])
def test_a_promise_made_is_kept_whoever_else_could_be_served(
    due_s: float, is_admitted: bool
) -> None:
    """`old` leaves 500 of the 8,000 tokens until 0.5 s; after that, 16,000 a second are banked."""
    old = R("old", 7501, due_s=0.5, done=1)
    new = [R(f"n{i}", 300, due_s) for i in range(2)]
    assert len(decide([*DECODES, old, *new]).rejected) == (0 if is_admitted else 1)
    assert not decide([*DECODES, R("old", 7301, due_s=0.5, done=1), *new]).rejected


def test_no_more_decodes_than_a_step_of_the_tightest_tpot_holds() -> None:
    """(10.02 - 5) / 0.05 = 100.4 tokens in a step; of five that come to 98 decodes, two are taken."""
    decodes = [R(f"d{i}", 100, 0.05, 0.05, out=1) for i in range(98)]
    new = [R(f"n{i}", 10, 1.0, 0.01002) for i in range(5)]
    # They have one token a step, the others one in five: 98 / 4.99 + 80.7 = 100.4.
    policy = SLOsServe(Admission.DP, prior_output_tokens=5000, margin=0)
    assert not policy.schedule(view_of([*decodes, *new])).rejected
    decodes = [R(f"d{i}", 100, 0.01002, 0.01002, out=1) for i in range(98)]
    policy.reset()
    assert len(policy.schedule(view_of([*decodes, *new])).rejected) == 3


@pytest.mark.parametrize(("num_blocks", "num_refused"), [(449, 1), (448, 2)])
def test_kv_cache_is_promised_whole(num_blocks: int, num_refused: int) -> None:
    """The decode needs 149 tokens and each prompt 150, when each has emitted its 50."""
    queue = [R("d", 100, 0.05, out=1), *(R(f"n{i}", 100, 0.5) for i in range(3))]
    policy = SLOsServe(Admission.DP, prior_output_tokens=50, margin=0)
    output = policy.schedule(view_of(queue, num_blocks=num_blocks))
    assert len(output.rejected) == num_refused


def test_seats_are_no_more_than_there_are() -> None:
    queue = [R("d", 100, 0.05, out=1), *(R(f"n{i}", 100, 0.5) for i in range(3))]
    limits = Limits(max_num_seqs=3)
    assert len(decide(queue, limits=limits).rejected) == 1  # type: ignore[arg-type]


PROMPTS = st.lists(
    st.tuples(st.integers(1, 6000), st.floats(0.02, 0.8), st.sampled_from([0.05, 0.1])),
    min_size=1,
    max_size=6,
)


@given(PROMPTS, st.integers(0, 4000), st.integers(0, 300))
def test_no_set_that_is_feasible_is_larger(
    prompts: list[tuple[int, float, float]], old_tokens: int, num_decodes: int
) -> None:
    """Tries all sets with the simulation as the judge; outputs outlast the prompts."""
    base = [R(f"d{i}", 100, due_s=0.05, out=1) for i in range(num_decodes)]
    base.append(R("old", old_tokens + 2, due_s=0.4, done=1))
    new = [R(f"n{i}", n, due_s, tpot_s) for i, (n, due_s, tpot_s) in enumerate(prompts)]
    view = view_of([*base, *new])
    running = list(view.running)
    load = PromisedLoad(view, FLAT, OutputLengths(1000), running[:-1], running[-1:], margin=0)
    columns = load.columns_of(sorted(view.waiting, key=lambda r: r.deadline_s))
    columns = columns[:, load.has_room(columns)]
    num = columns.shape[1]
    taken = best_subset(load.room_beside(columns), columns) if num else []
    assert not taken or _is_feasible(load, columns[:, taken])
    larger = map(list, combinations(range(num), len(taken) + 1))
    assert not any(_is_feasible(load, columns[:, others]) for others in larger)


def _is_feasible(load: PromisedLoad, new: Floats) -> bool:
    kept = load._columns, load._sweep
    is_feasible = load.add(new)
    load._columns, load._sweep = kept
    return is_feasible


def test_more_of_a_burst_are_promised_than_one_by_one_and_all_promises_are_kept() -> None:
    """Twelve arrive at once, with 18,000 tokens until they are due: three long prompts and all
    short ones."""
    slo = SLO(ttft_s=1.0, tpot_s=0.05)
    lines = [TraceRequest(f"r{i}", 0.0, 400 if i % 2 else 5000, 50, slo) for i in range(12)]
    served = {}
    for admission in Admission:
        policy = SLOsServe(admission, prior_output_tokens=50, margin=0.1)
        config = SimulationConfig(num_blocks=20_000)
        requests = simulate(Trace.of(lines, "burst"), policy, FLAT, config)
        served[admission] = [r for r in requests if r.token_times_s]
        for request in served[admission]:
            assert request.token_times_s[0] - request.arrival_s <= slo.ttft_s
    assert len(served[Admission.DP]) == 9
    assert len(served[Admission.SIMULATE]) < 9
