"""The laws that hold between runs: the same scenario, played in several ways, agrees."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import hypothesis
from hypothesis import given

from slosched.core import Policy, Request, SchedulerOutput
from slosched.core.merged_blocks import repeated_in
from slosched.testing.plans import LawBrokenError, check_no_room_is_left, require
from slosched.testing.play import play
from slosched.testing.random_scenarios import scenarios, search
from slosched.testing.scenario import Scenario


def check_policy(
    make_policy: Callable[[], Policy],
    *,
    max_examples: int = 200,
    seed: int | None = 0,
    conserves_work: bool = True,
    shrink: bool = True,
) -> None:
    """Raise if a policy breaks a law on any of `max_examples` random scenarios.

    The same `seed` gives the same scenarios; None gives new ones at every call. A policy that
    leaves tokens or seats of a step unused on purpose while requests wait needs
    `conserves_work=False`. Without `shrink`, the error is that of the first scenario on which a law
    broke, which may be a large one.
    """

    @search(max_examples, shrink=shrink)
    @given(scenarios())
    def laws_hold(scenario: Scenario) -> None:
        check_laws(make_policy, scenario, conserves_work=conserves_work)

    if seed is not None:
        laws_hold = hypothesis.seed(seed)(laws_hold)
    laws_hold()


def check_laws(
    make_policy: Callable[[], Policy], scenario: Scenario, *, conserves_work: bool = True
) -> None:
    """Play one scenario in several ways; raise LawBrokenError if a law does not hold."""
    run = play(make_policy(), scenario)
    shifted = scenario.shifted(1024.0)
    later = play(make_policy(), shifted)
    if [output for _, output in later.decisions] != [output for _, output in run.decisions]:
        # Chance would change them as well, so only now are more runs of the same worth their time.
        for one, other in ((later, shifted), (run, scenario)):
            again = play(make_policy(), other)
            require(one.decisions == again.decisions, "the same seed gave other decisions")
        raise LawBrokenError("shifting all times changed the decisions")
    renamed = play(make_policy(), scenario, name=_backwards)
    names = {f"r{i}": _backwards(i) for i in range(len(scenario.requests))}
    require(
        [_renamed(output, names) for _, output in run.decisions]
        == [_renamed(output, {}) for _, output in renamed.decisions],
        "renaming the requests changed the decisions",
    )
    if conserves_work:
        play(make_policy(), scenario.unhurried(), laws=(check_no_room_is_left,))
    in_groups = scenario.simulated(make_policy())
    one_by_one = scenario.simulated(make_policy(), on_step=lambda _: None)
    require(
        [fate(request) for request in in_groups] == [fate(request) for request in one_by_one],
        "`schedule_beside` or `decodes_until_s` promised what `schedule` does not do",
    )


def _backwards(index: int) -> str:
    """Return a name for each index, such that names sort in the reverse order of indices."""
    return f"z{999 - index}"


def _renamed(output: SchedulerOutput, names: dict[str, str]) -> list[object]:
    def new(request_ids: Sequence[str]) -> list[str]:
        return [names.get(request_id, request_id) for request_id in request_ids]

    return [
        list(
            zip(
                new(list(output.num_scheduled_tokens)),
                output.num_scheduled_tokens.values(),
                strict=True,
            )
        ),
        new(output.preempted),
        new(output.swapped_out),
        new(output.swapped_in),
        list(zip(new(list(output.rejected)), output.rejected.values(), strict=True)),
        list(
            zip(new(list(output.num_found_tokens)), output.num_found_tokens.values(), strict=True)
        ),
        sorted(new(sorted(repeated_in(output)))),
    ]


def fate(request: Request) -> tuple[object, ...]:
    """Return what became of a request, to compare it with the same one of another run."""
    times_s = tuple(request.token_times_s)
    return (times_s, request.end_reason, request.end_s, request.num_preemptions, request.num_swaps)
