"""A policy from one line of text."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from slosched.core import Policy, SchedulerOutput, SchedulerView
from slosched.policy import EDF, POLICIES, WRAPPERS, EarlyRejection, PastFuture, SLOAware
from slosched.policy.kit.drop import Drop
from slosched.policy.kit.wrapper import Gate, Wrapper
from slosched.policy.slo_aware import LateRule
from slosched.policy.spec import (
    PolicySpecError,
    make_policy,
    policy_classes,
    policy_fields,
    tried_values,
    values_to_try,
    with_options,
)


@dataclass
class Mine(Policy):
    """A user's own policy."""

    margin: float = 0.0

    def schedule(self, view: SchedulerView) -> SchedulerOutput:
        raise NotImplementedError


@dataclass
class Optional(Mine):
    """A policy with options that need not be set, and one that cannot be."""

    limit: int | None = None
    pair: tuple[int, ...] = (1, 2)


@dataclass
class Open(Wrapper):
    """A user's own wrapper."""

    width: int = 1

    def gate(self, view: SchedulerView) -> Gate:
        return Gate(view.waiting, {})


class NotADataclass(Policy):
    """A policy without fields to set."""

    def schedule(self, view: SchedulerView) -> SchedulerOutput:
        raise NotImplementedError


@pytest.mark.parametrize("name", POLICIES)
def test_a_name_alone_gives_the_defaults(name: str) -> None:
    assert make_policy(name) == POLICIES[name]()


def test_options_are_read_as_their_fields_types() -> None:
    assert make_policy("edf:token_budget=256,drop=expired") == EDF(256, Drop.EXPIRED)
    policy = make_policy("slo_aware:margin=0.1,late=bind,expire_begun=false")
    assert policy == SLOAware(margin=0.1, late=LateRule.BIND, expire_begun=False)


def test_a_policy_of_ones_own_is_named_by_its_module() -> None:
    assert make_policy(f"{__name__}:Mine:margin=0.5") == Mine(0.5)
    assert make_policy(f"{__name__}:Mine:margin=2e+1+{__name__}:Open:width=2") == Open(Mine(20), 2)


def test_an_option_may_be_none() -> None:
    assert make_policy(f"{__name__}:Optional:limit=3") == Optional(limit=3)
    assert make_policy(f"{__name__}:Optional:limit=none") == Optional()
    assert policy_fields(Optional)[1:] == [("limit", None, []), ("pair", (1, 2), [])]


def test_wrappers_follow_what_they_wrap_after_a_plus() -> None:
    edf = EDF(256, Drop.EXPIRED)
    spec = "edf:token_budget=256,drop=expired + early_rejection:max_load=0.9+past_future"
    assert make_policy(spec) == PastFuture(EarlyRejection(edf, max_load=0.9))
    assert policy_classes(spec) == [EDF, EarlyRejection, PastFuture]


def test_what_wraps_a_policy_can_be_tuned_with_it() -> None:
    spec = f"edf:drop=expired+early_rejection+{__name__}:Open"
    assert values_to_try(spec) == {
        **tried_values(EDF),
        "early_rejection.max_load": tried_values(EarlyRejection)["max_load"],
    }
    options = {"token_budget": "256", "early_rejection.max_load": "0.8", "Open.width": "3"}
    assert with_options(spec, options) == (
        f"edf:drop=expired,token_budget=256+early_rejection:max_load=0.8+{__name__}:Open:width=3"
    )
    assert with_options("edf:drop=expired", {"drop": "never"}) == "edf:drop=never"
    with pytest.raises(
        PolicySpecError, match=r"no parameter max_load; .* early_rejection\.max_load"
    ):
        with_options(spec, {"max_load": "1"})


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        ("nope", "no policy 'nope'; there are fcfs"),
        ("slo-aware", "no policy 'slo-aware' \\(did you mean slo_aware\\?\\); there are fcfs"),
        ("edf:budget=1", "has no option 'budget=1' .*did you mean token_budget.* drop"),
        ("mine/lifo.py:LIFO", "no policy 'mine/lifo.py': No such file"),
        (":Mine", "cannot import :Mine"),
        (f"{__name__}:Optional:limit=many", "limit='many' is not of type int"),
        (f"{__name__}:Optional:pair=1", "pair cannot be set by a text"),
        ("edf:token_budget", "option token_budget has no value; write token_budget=value"),
        ("edf:token_budget=many", "token_budget='many' is not of type int"),
        ("edf:drop=always", "drop='always' is not one of never, expired, infeasible"),
        ("edf:token_budget=0", "token_budget must be at least 1, not 0"),
        ("slo_aware:margin=2", "margin must be in \\[0, 1\\), not 2.0"),
        ("slo_aware:margin=nan", "margin must be in"),
        ("slo_aware:cascade=0", "cascade must be at least 1, not 0"),
        ("slo_aware:min_chunk_tokens=0", "min_chunk_tokens must be at least 1"),
        ("slo_aware:expire_begun=maybe", "expire_begun='maybe'"),
        ("no_such_module:X", "cannot import no_such_module:X"),
        (f"{__name__}:LateRule", "is not a subclass of slosched.core.Policy"),
        (f"{__name__}:NotADataclass:margin=1", "has no option 'margin=1': it has none at all"),
        ("early_rejection", "wraps a policy: name one before it, as in sarathi\\+early_rejection"),
        ("sarathi+edf", "'edf' cannot follow a plus: .* early_rejection, past_future"),
        ("sarathi+nope", "no policy 'nope'; .* after a plus early_rejection"),
        ("sarathi+", "'sarathi\\+'"),
        ("+early_rejection", "no policy ''"),
        ("sarathi+early_rejection:max_load=0", "max_load must be positive, not 0.0"),
        ("sarathi+early_rejection:inner=edf", "no option 'inner=edf'; .* max_load"),
        ("sarathi+past_future:reserve=1", "reserve must be in \\[0, 1\\), not 1.0"),
    ],
)
def test_what_is_wrong_with_a_spec_is_said(spec: str, complaint: str) -> None:
    with pytest.raises(PolicySpecError, match=complaint):
        make_policy(spec)


def test_the_fields_of_a_policy_are_listed_with_defaults_and_choices() -> None:
    assert policy_fields(EDF) == [
        ("token_budget", 512, []),
        ("drop", Drop.NEVER, ["never", "expired", "infeasible"]),
    ]


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_can_be_tuned_and_takes_what_is_tried(name: str) -> None:
    tried = tried_values(POLICIES[name])
    assert tried
    for option, values in tried.items():
        assert values[0] == getattr(make_policy(name), option)
        for value in values:
            assert getattr(make_policy(f"{name}:{option}={value}"), option) == value


@pytest.mark.parametrize("name", WRAPPERS)
def test_every_wrapper_can_be_tuned_and_takes_what_is_tried(name: str) -> None:
    assert tried_values(WRAPPERS[name])
    for option, values in values_to_try(f"edf+{name}").items():
        for value in values:
            make_policy(with_options(f"edf+{name}", {option: str(value)}))


def test_a_policy_without_tunable_fields_has_nothing_to_try() -> None:
    assert tried_values(Mine) == tried_values(NotADataclass) == {}


class TestFromAFile:
    ONE = (
        "from dataclasses import dataclass\n"
        "from slosched.policy.edf import EDF\n\n"
        "@dataclass\nclass Mine(EDF):\n    extra: int = 3\n"
    )

    @pytest.fixture(autouse=True)
    def own_path(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let later tests not find the modules beside these files."""
        monkeypatch.setattr(sys, "path", [*sys.path])

    def test_it_is_named_by_its_path(self, tmp_path: Path) -> None:
        path = tmp_path / "mine.py"
        path.write_text(self.ONE, encoding="utf-8")
        for spec in (f"{path}", f"{path}:Mine"):
            assert type(make_policy(spec)).__name__ == "Mine", "EDF is imported there, not defined"
            assert getattr(make_policy(f"{spec}:extra=5,drop=expired"), "extra") == 5  # noqa: B009
        assert with_options(f"{path}", {"extra": "7"}) == f"{path}:extra=7"
        assert policy_classes(f"{path}") == policy_classes(f"{path}:Mine")

    @pytest.mark.parametrize(
        ("source", "name", "complaint"),
        [
            ("x = 1\n", "", "defines no subclass of slosched.Policy"),
            (ONE + "class Other(EDF): ...\n", "", "several policies: .*:Mine, .*:Other"),
            (ONE, ":Yours", "defines no policy 'Yours'; it defines Mine"),
            ("def broken(:\n", "", "invalid syntax"),
            ("import no_such_module\n", "", "no_such_module"),
        ],
    )
    def test_a_mistake_is_told(
        self, tmp_path: Path, source: str, name: str, complaint: str
    ) -> None:
        path = tmp_path / "mine.py"
        path.write_text(source, encoding="utf-8")
        with pytest.raises(PolicySpecError, match=complaint):
            make_policy(f"{path}{name}")

    def test_modules_beside_it_can_be_imported(self, tmp_path: Path) -> None:
        (tmp_path / "beside_mine.py").write_text("EXTRA = 9\n", encoding="utf-8")
        path = tmp_path / "mine.py"
        text = self.ONE.replace("= 3", "= EXTRA")
        path.write_text(f"from beside_mine import EXTRA\n{text}", encoding="utf-8")
        assert getattr(make_policy(f"{path}"), "extra") == 9  # noqa: B009
