"""Tests of tuning: the values that are tried, the one that wins, and the file that is written."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from factories import make_model

from slosched.core import SLO, SchedulerOutput, SchedulerView, tunable
from slosched.evaluate.capacity import CapacityError, Contender, Plan, local_pool
from slosched.evaluate.tuning import TUNED_FORMAT, Objective, Tuned, Tuner, judge, values_of
from slosched.policy import Sarathi
from slosched.simulator.simulate import SimulationConfig
from slosched.workload import Trace, synthesize


@dataclass
class Hampered(Sarathi):
    """A policy whose budget is small at its defaults, and which two options raise."""

    speed: int = tunable(1, 2, 3)
    help_needed: bool = tunable(True, False)

    def schedule(self, view: SchedulerView) -> SchedulerOutput:
        budget = 40 * self.speed * (1 if self.help_needed else 2)
        return Sarathi(token_budget=budget).schedule(view)

    def schedule_beside(self, decodes: object, view: SchedulerView) -> None:
        return None


PLAN = Plan((0.9,), precision=0.1)
HAMPERED = f"{__name__}:Hampered"
BASE = Contender(HAMPERED, HAMPERED, make_model(), "test", SimulationConfig())


def windows(first: int) -> list[Trace]:
    return [
        synthesize("poisson", num_requests=60, seed=s, slo=SLO(0.2, 0.05), prompt=256, output=2)
        for s in range(first, first + 2)
    ]


def tuned(objective: Objective, base: Contender = BASE, **given: list[str]) -> Tuned:
    values = values_of(base.policy, given)
    tuner = Tuner(base, values, windows(10), objective, precision=0.1)
    return tuner.run(local_pool(1))


@pytest.mark.parametrize("objective", [Objective(target=0.9), Objective(rate=60.0)], ids=str)
def test_each_parameter_takes_its_best_value(objective: Objective) -> None:
    found = tuned(objective, speed=["1", "3"], help_needed=["true", "false"])
    assert found.policy == f"{HAMPERED}:speed=3,help_needed=false"
    assert [trial.score for trial in found.trials] == sorted(
        (trial.score for trial in found.trials), reverse=True
    )
    assert found.trials[0].score > found.trials[-1].score


@pytest.mark.parametrize("rate", [0.3, 1.0, 1.004, 4.0, 31.4])
def test_a_policy_that_serves_all_is_tuned_to_the_rate_that_was_asked_for(rate: float) -> None:
    base = Contender("fcfs", "fcfs", make_model(), "test", SimulationConfig())
    easy = [synthesize("poisson", num_requests=20, prompt=16, output=2)]
    (trial,) = Tuner(base, {}, easy, Objective(rate=rate), precision=0.2).run(local_pool(1)).trials
    assert trial.score == rate


def test_what_a_policy_declares_is_tried() -> None:
    values = values_of(HAMPERED, {})
    assert values["speed"] == ["1", "2", "3"]
    assert values["help_needed"] == ["True", "False"]
    assert "token_budget" in values_of("sarathi", {})


def test_where_no_setting_can_be_replayed_the_reason_is_told() -> None:
    alone = [synthesize("poisson", num_requests=1, seed=seed) for seed in range(2)]
    tuner = Tuner(BASE, {"speed": ["1", "3"]}, alone, Objective(target=0.9), precision=0.1)
    with pytest.raises(CapacityError, match=r"no setting of .*Hampered could be tried: .* no rate"):
        tuner.run(local_pool(1))


def test_the_best_is_judged_on_other_requests() -> None:
    found = tuned(Objective(target=0.9), speed=["3"])
    study = judge(BASE, found, windows(0), PLAN, local_pool(1))
    assert study.contenders == [HAMPERED, f"{HAMPERED}:speed=3 (tuned)"]
    assert study.ratio(study.contenders[1], HAMPERED, 0.9).value > 1.5


def test_a_policy_that_nothing_improves_stays_as_it_was() -> None:
    best = replace(BASE, policy=f"{HAMPERED}:speed=3")
    found = tuned(Objective(target=0.9), best, speed=["3", "1"])
    assert found.policy == best.policy
    assert found.trials[0].setting == {}
    assert len(found.trials) == 2, "what makes the same policy is tried once"
    assert judge(best, found, windows(0), PLAN, local_pool(1)).contenders == [HAMPERED]


def test_a_setting_that_fails_loses() -> None:
    found = tuned(Objective(target=0.9), speed=["0", "2"])
    assert found.policy == f"{HAMPERED}:speed=2"
    assert "token_budget" in found.trials[-1].error


def test_values_that_do_not_go_together_are_left_out() -> None:
    base = replace(BASE, policy="sglang:enable_priority_scheduling=true")
    values = {"schedule_policy": ["lof", "lpm"], "max_num_seqs": ["8"]}
    found = Tuner(base, values, windows(10), Objective(rate=60.0)).run(local_pool(1))
    assert {trial.setting.get("schedule_policy") for trial in found.trials} == {None, "lof"}
    assert not any(trial.error for trial in found.trials)


@pytest.mark.parametrize("most", [1, 2, 3])
def test_no_more_settings_are_tried_than_allowed(most: int) -> None:
    values = values_of(HAMPERED, {"speed": ["2", "3"], "help_needed": ["false"]})
    tuner = Tuner(BASE, values, windows(10), Objective(rate=60.0), max_trials=most)
    found = tuner.run(local_pool(1))
    assert [len(tuner.trials), len(found.trials)] == [most, most]
    assert (found.trials[0].setting == {"speed": "3"}) == (most == 3)


def test_at_least_one_setting_is_tried() -> None:
    with pytest.raises(ValueError, match="max_trials must be at least 1, not 0"):
        Tuner(BASE, {}, windows(10), Objective(rate=60.0), max_trials=0)


def test_a_limit_is_tuned_like_an_option() -> None:
    narrow = replace(BASE.config, limits=replace(BASE.config.limits, max_num_batched_tokens=16))
    base = replace(BASE, name="fcfs", policy="fcfs", config=narrow)
    found = tuned(Objective(target=0.9), base, max_num_batched_tokens=["16", "512"])
    assert (found.policy, found.limits) == ("fcfs", {"max_num_batched_tokens": 512})
    assert found.contender(base).config.limits.max_num_batched_tokens == 512


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"speeed": ["1"]}, "no parameter speeed; it has .*speed.*max_num_seqs"),
        ({"speed": ["fast"]}, "fast"),
        ({"max_num_seqs": ["many"]}, "max_num_seqs='many' is not of type int"),
        ({"max_num_seqs": ["0"]}, "max_num_seqs must be at least 1"),
    ],
)
def test_what_cannot_be_tried_is_named(given: dict[str, list[str]], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        values_of(HAMPERED, given)


def test_what_was_found_is_read_as_it_was_written(tmp_path: Path) -> None:
    found = tuned(Objective(rate=30.0), speed=["2"])
    found.write(tmp_path / "deep" / "tuned.json")
    assert Tuned.read(tmp_path / "deep" / "tuned.json") == found
    for text in ("{}", "[]", "no json", '{"format": "slosched-tuned/9"}'):
        (tmp_path / "other.json").write_text(text)
        with pytest.raises(CapacityError, match=r"other\.json is not what `slosched tune` writes"):
            Tuned.read(tmp_path / "other.json")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"limits": {"max_num_seqs": "256"}}, "max_num_seqs must be a whole number .* '256'"),
        ({"limits": {"max_num_seqs": 0}}, "max_num_seqs must be a whole number of 1 or more"),
        ({"limits": {"block_size": 16}}, "no limits to tune: block_size"),
        ({"limits": ["max_num_seqs"]}, "keys"),
        ({"policy": 7}, "policy must be a spec such as fcfs, not 7"),
    ],
)
def test_what_nobody_tuned_is_refused_with_its_file(
    tmp_path: Path, changed: dict[str, object], said: str
) -> None:
    document = {"format": TUNED_FORMAT, "base": "fcfs", "policy": "fcfs", "limits": {}}
    document |= {"metric": "capacity", "workload": "poisson", "trials": [], **changed}
    (tmp_path / "mine.json").write_text(json.dumps(document))
    with pytest.raises(CapacityError, match=rf"mine\.json is not what .*{said}"):
        Tuned.read(tmp_path / "mine.json")
