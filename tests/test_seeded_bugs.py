"""The laws catch bugs that are planted on purpose, so they do check something."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, find, settings

from slosched.core import (
    DecodeGroup,
    EndReason,
    ForeseesDecodes,
    IllegalPlanError,
    Limits,
    Policy,
    Request,
    RequestStatus,
    ScheduledBatch,
    SchedulerOutput,
    SchedulerView,
    StalledError,
)
from slosched.engine.checked_memory import WrongBlockError
from slosched.kv import KVCache, KVCorruptionError
from slosched.policy import FCFS
from slosched.scheduler.carry_out import CarryOut
from slosched.scheduler.lifecycle import Lifecycle
from slosched.simulator.decodes import GroupedDecodes
from slosched.testing import LawBrokenError, Scenario, check_laws, check_policy, scenarios

NOTICED = (LawBrokenError, WrongBlockError)
"""The errors of the laws, and of `CheckedMemory`, which may find a bug earlier."""
MAX_EXAMPLES: int = inspect.signature(check_policy).parameters["max_examples"].default
"""The number that docs/how-to/add-a-policy.md uses."""
SEEDS = (0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 20)))


@pytest.fixture(params=SEEDS)
def seed(request: pytest.FixtureRequest) -> int:
    """Return the seed: bugs are caught with any seed, and `make test` tries the first."""
    return int(request.param)


def breaks(
    make_policy: Callable[[], Policy],
    error: type[Exception] | tuple[type[Exception], ...],
    seed: int,
    says: str = "",
) -> Scenario:
    """Return a scenario in which a law breaks; fail if there is none."""

    @cache  # hypothesis asks again about what it found; a bug with a memory may then hide
    def is_noticed(scenario: Scenario) -> bool:
        try:
            check_laws(make_policy, scenario)
        except Exception as noticed:
            return isinstance(noticed, error) and says in str(noticed)
        return False

    return find(
        scenarios(),
        is_noticed,
        random=Random(seed),
        settings=settings(
            max_examples=MAX_EXAMPLES,
            deadline=None,
            database=None,
            phases=(Phase.generate,),
            suppress_health_check=list(HealthCheck),
        ),
    )


@dataclass
class Bent(Policy):
    """FCFS whose plans a function changes."""

    bend: Callable[[SchedulerView, SchedulerOutput], SchedulerOutput]

    def schedule(self, view: SchedulerView) -> SchedulerOutput:
        return self.bend(view, FCFS().schedule(view))


def one_token_too_many(_: SchedulerView, output: SchedulerOutput) -> SchedulerOutput:
    longer = {name: n + 1 for name, n in output.num_scheduled_tokens.items()}
    return replace(output, num_scheduled_tokens=longer, shape=None)


def over_the_token_limit(view: SchedulerView, output: SchedulerOutput) -> SchedulerOutput:
    whole = {
        r.request_id: r.num_uncomputed_tokens
        for r in (*view.running, *view.waiting)
        if r.request_id in output.num_scheduled_tokens
    }
    return replace(output, num_scheduled_tokens=whole, shape=None)


def forgets_the_last(_: SchedulerView, output: SchedulerOutput) -> SchedulerOutput:
    first = dict(list(output.num_scheduled_tokens.items())[:-1])
    return replace(output, num_scheduled_tokens=first, shape=None)


def forgets_the_last_of_many(view: SchedulerView, output: SchedulerOutput) -> SchedulerOutput:
    return forgets_the_last(view, output) if len(output.num_scheduled_tokens) > 1 else output


def computes_a_token_each(_: SchedulerView, output: SchedulerOutput) -> SchedulerOutput:
    singly = dict.fromkeys(output.num_scheduled_tokens, 1)
    return replace(output, num_scheduled_tokens=singly, shape=None)


def runs_from_the_host(_: SchedulerView, output: SchedulerOutput) -> SchedulerOutput:
    return replace(output, swapped_in=())


def touches_a_request(view: SchedulerView, output: SchedulerOutput) -> SchedulerOutput:
    for request in view.waiting:
        request.deadline_s += 1.0
    return output


def rejects_the_running(view: SchedulerView, output: SchedulerOutput) -> SchedulerOutput:
    speaking = [r.request_id for r in view.running if r.num_output_tokens]
    left = {k: n for k, n in output.num_scheduled_tokens.items() if k not in speaking}
    rejected = dict.fromkeys(speaking, EndReason.INFEASIBLE)
    return SchedulerOutput(num_scheduled_tokens=left, rejected=rejected)


@pytest.mark.parametrize(
    ("bend", "error"),
    [
        (one_token_too_many, (LawBrokenError, IllegalPlanError)),
        (over_the_token_limit, (LawBrokenError, IllegalPlanError)),
        (forgets_the_last, (LawBrokenError, StalledError)),
        (forgets_the_last_of_many, LawBrokenError),
        (computes_a_token_each, LawBrokenError),
        (runs_from_the_host, LawBrokenError),
        (touches_a_request, LawBrokenError),
        (rejects_the_running, IllegalPlanError),
    ],
)
def test_a_bad_plan_is_caught(
    bend: Callable[[SchedulerView, SchedulerOutput], SchedulerOutput],
    error: type[Exception] | tuple[type[Exception], ...],
    seed: int,
) -> None:
    breaks(lambda: Bent(bend), error, seed)


@dataclass
class Blind(Policy):
    """FCFS that is shown only a part of the view."""

    shown: Callable[[SchedulerView], SchedulerView]

    def schedule(self, view: SchedulerView) -> SchedulerOutput:
        return FCFS().schedule(self.shown(view))


def without_swapped(view: SchedulerView) -> SchedulerView:
    return replace(view, swapped=())


def without_late(view: SchedulerView) -> SchedulerView:
    in_time = tuple(r for r in view.waiting if r.slack_s(view.now_s) >= 0)
    return replace(view, waiting=in_time)


def without_waiting_beside_running(view: SchedulerView) -> SchedulerView:
    return replace(view, waiting=()) if view.running else view


@pytest.mark.parametrize("shown", [without_swapped, without_late, without_waiting_beside_running])
def test_who_overlooks_requests_is_caught(
    shown: Callable[[SchedulerView], SchedulerView], seed: int
) -> None:
    breaks(lambda: Blind(shown), (LawBrokenError, StalledError), seed)


def test_a_forgotten_return_is_named(seed: int) -> None:
    class Forgetful(Policy):
        def schedule(self, view: SchedulerView) -> SchedulerOutput:
            FCFS().schedule(view)  # type: ignore[return]

    breaks(Forgetful, LawBrokenError, seed, says="Forgetful.schedule returned None, not a")


def test_who_starts_prompts_only_when_one_arrives_is_caught(seed: int) -> None:
    @dataclass
    class WokenByArrivals(Policy):
        known: set[str] = field(default_factory=set)

        def schedule(self, view: SchedulerView) -> SchedulerOutput:
            waiting = {r.request_id for r in view.waiting}
            is_woken = not waiting <= self.known
            self.known |= waiting
            return FCFS().schedule(view if is_woken else replace(view, waiting=()))

        def reset(self) -> None:
            self.known.clear()

    breaks(WokenByArrivals, (LawBrokenError, StalledError), seed)


def test_a_pause_is_named(seed: int) -> None:
    """The engine would not notice it while a step is still running."""

    @dataclass
    class Resting(Policy):
        num_asked: int = 0

        def schedule(self, view: SchedulerView) -> SchedulerOutput:
            self.num_asked += 1
            return SchedulerOutput() if self.num_asked % 4 == 0 else FCFS().schedule(view)

        def reset(self) -> None:
            self.num_asked = 0

    breaks(Resting, LawBrokenError, seed, says="nothing is planned although")


def test_who_starts_over_for_ever_is_caught(seed: int) -> None:
    class Impatient(Policy):
        """Gives up on prompts that one step does not finish."""

        def schedule(self, view: SchedulerView) -> SchedulerOutput:
            begun = [r.request_id for r in view.running if not r.is_decode]
            if begun:
                return SchedulerOutput(preempted=tuple(begun))
            return FCFS().schedule(view)

    breaks(Impatient, LawBrokenError, seed, says="no end is in sight")


def test_who_schedules_the_dead_is_caught(seed: int) -> None:
    @dataclass
    class Nostalgic(Policy):
        last: str | None = None

        def schedule(self, view: SchedulerView) -> SchedulerOutput:
            output = FCFS().schedule(view)
            planned, before = dict(output.num_scheduled_tokens), self.last
            self.last = next(iter(planned), None)
            if before is not None:
                planned.setdefault(before, 1)
            return replace(output, num_scheduled_tokens=planned, shape=None)

        def reset(self) -> None:
            self.last = None

    breaks(Nostalgic, LawBrokenError, seed, says="is scheduled but was not shown")


def test_who_draws_lots_is_caught(seed: int) -> None:
    @dataclass
    class Lottery(Policy):
        chance: Random

        def schedule(self, view: SchedulerView) -> SchedulerOutput:
            drawn = self.chance.sample(list(view.waiting), len(view.waiting))
            return FCFS().schedule(replace(view, waiting=tuple(drawn)))

    breaks(lambda: Lottery(Random()), LawBrokenError, seed, says="the same seed gave other")


def test_a_policy_with_a_memory_is_caught(seed: int) -> None:
    """Every second instance forgets a request, so two runs of a scenario differ."""
    num_made = itertools.count()

    def forget_every_second_time() -> Policy:
        return Bent(forgets_the_last_of_many) if next(num_made) % 2 else FCFS()

    breaks(forget_every_second_time, LawBrokenError, seed, says="the same seed gave other")


def test_a_policy_that_goes_by_the_hour_is_caught(seed: int) -> None:
    class LastComeFirstLater(Policy):
        def schedule(self, view: SchedulerView) -> SchedulerOutput:
            waiting = view.waiting[::-1] if view.now_s > 500 else view.waiting
            return FCFS().schedule(replace(view, waiting=tuple(waiting)))

    breaks(LastComeFirstLater, LawBrokenError, seed, says="shifting all times changed")


def test_a_policy_that_reads_names_is_caught(seed: int) -> None:
    @dataclass
    class Alphabetical(Policy):
        def schedule(self, view: SchedulerView) -> SchedulerOutput:
            by_name = sorted(view.waiting, key=lambda r: r.request_id)
            return FCFS().schedule(replace(view, waiting=tuple(by_name)))

    breaks(Alphabetical, LawBrokenError, seed)


def test_a_false_promise_about_decodes_is_caught(seed: int) -> None:
    class OneByOne(ForeseesDecodes):
        """Schedule only the oldest of several decodes, although it claims to serve all of them."""

        def schedule(self, view: SchedulerView) -> SchedulerOutput:
            tokens = FCFS().schedule(view).num_scheduled_tokens
            if all(n == 1 for n in tokens.values()):
                tokens = dict(itertools.islice(tokens.items(), 1))
            return SchedulerOutput(tokens)

        def decodes_until_s(self, decodes: DecodeGroup, limits: Limits) -> float:
            return math.inf

    breaks(OneByOne, (LawBrokenError, IllegalPlanError), seed)


def test_another_plan_beside_decodes_is_caught(seed: int) -> None:
    class Lazy(FCFS):
        def schedule_beside(self, decodes: DecodeGroup, view: SchedulerView) -> SchedulerOutput:
            return SchedulerOutput()

    breaks(Lazy, LawBrokenError, seed)


def test_a_block_that_the_group_of_decodes_takes_late_is_caught(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(GroupedDecodes, "num_new_blocks", 0)
    breaks(FCFS, (*NOTICED, KVCorruptionError), seed)


def test_a_lost_block_is_caught(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    free = KVCache.free

    def leaky(self: KVCache, request_id: str) -> None:
        if len(self._tables.get(request_id, ())) > 1:
            self._tables[request_id].pop()
        free(self, request_id)

    monkeypatch.setattr(KVCache, "free", leaky)
    breaks(FCFS, (*NOTICED, KVCorruptionError, StalledError), seed)


def test_a_chunk_that_is_computed_too_far_is_caught(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    carry_out = CarryOut.__call__

    def overlong(self: CarryOut, *args: Any, **options: Any) -> ScheduledBatch:
        batch = carry_out(self, *args, **options)
        for chunk in batch.chunks:
            if chunk.num_new_tokens > 2 and not chunk.emits_token:
                chunk.request.num_computed_tokens += 1
        return batch

    monkeypatch.setattr(CarryOut, "__call__", overlong)
    breaks(FCFS, (*NOTICED, IllegalPlanError, StalledError), seed)


def test_a_double_finish_is_caught(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    end = Lifecycle.end

    def twice(self: Lifecycle, request: Request, reason: EndReason, now_s: float) -> None:
        end(self, request, reason, now_s)
        if request.status is RequestStatus.FINISHED:
            self._ended.append(request)

    monkeypatch.setattr(Lifecycle, "end", twice)
    breaks(FCFS, NOTICED, seed)


def test_a_lost_request_is_caught(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    preempt = Lifecycle.preempt

    def forgetful(self: Lifecycle, request_ids: tuple[str, ...]) -> None:
        preempt(self, request_ids)
        for request_id in request_ids:
            del self._queues.waiting[request_id]

    monkeypatch.setattr(Lifecycle, "preempt", forgetful)
    # The queues themselves miss it where its cached blocks change.
    breaks(FCFS, (*NOTICED, KeyError), seed)
