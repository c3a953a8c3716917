"""The parts of the vLLM integration that need no vLLM: settings, SLOs, times, counts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from slosched.core import NO_SLO, SLO, BatchShape, DeadlineRule, Limits, OnInfeasible
from slosched.integrations.vllm.settings import SettingsError, read_settings
from slosched.integrations.vllm.slo import BadPromiseError, Promises
from slosched.integrations.vllm.steps import StepTimes
from slosched.integrations.vllm.truth import Divergence, Truth
from slosched.perfmodel import LinearCoefficients, LinearModel, ServerTime, save_model

DEFAULT = SLO(1.0, 0.05)
PROMISES = Promises(DEFAULT, {"gold": SLO(0.2, 0.02)})


@pytest.mark.parametrize(
    ("extra_args", "expected"),
    [
        (None, DEFAULT),
        ({"other": 1}, DEFAULT),
        ({"slo_ttft_ms": 300}, SLO(0.3, 0.05)),
        ({"slo_tpot_ms": "40"}, SLO(1.0, 0.04)),
        ({"slo_tier": "gold"}, SLO(0.2, 0.02)),
        ({"slo_tier": "gold", "slo_tpot_ms": 10.0}, SLO(0.2, 0.01)),
        ({"slo_e2e_ms": 7000}, SLO(1.0, 0.05, 7.0)),
    ],
)
def test_a_request_is_promised_what_it_asks_for_else_its_tier_else_the_default(
    extra_args: dict[str, object] | None, expected: SLO
) -> None:
    assert PROMISES.of(extra_args) == expected


@pytest.mark.parametrize("value", [-1, 0, "soon", float("nan"), float("inf"), True, [5], 10**400])
def test_no_other_promise_is_taken(value: object) -> None:
    with pytest.raises(BadPromiseError, match="slo_ttft_ms"):
        PROMISES.of({"slo_ttft_ms": value})


def test_a_promise_of_a_name_that_does_not_exist_is_refused() -> None:
    with pytest.raises(BadPromiseError, match=r"'slo_e2e_s' \(did you mean slo_e2e_ms\?\)"):
        PROMISES.of({"slo_e2e_s": 7})


@pytest.mark.parametrize(
    ("asked", "tier"), [(None, None), ({}, None), ({"slo_tier": "gold"}, "gold")]
)
def test_a_request_is_in_the_tier_that_it_names(
    asked: dict[str, object] | None, tier: str | None
) -> None:
    assert PROMISES.tier_of(asked) == tier


def test_a_tier_named_default_is_for_requests_that_name_none() -> None:
    promises = Promises(DEFAULT, {"default": SLO(9.0, 9.0), "gold": SLO(0.2, 0.02)})
    assert promises.of(None) == promises.of({"other": 1}) == SLO(9.0, 9.0)
    assert promises.of({"slo_ttft_ms": 300}) == SLO(0.3, 9.0)
    assert (promises.tier_of(None), promises.tier_of({"slo_tier": "gold"})) == ("default", "gold")


def test_what_becomes_of_an_slo_that_cannot_be_kept() -> None:
    section = {
        "on_infeasible": "serve",
        "slo_tiers": {"batch": {"slo_ttft_s": 30, "on_infeasible": "relegate"}, "gold": {}},
    }
    promises = read_settings({"slosched": section}).make_promises()
    assert promises.when_infeasible(None) is OnInfeasible.SERVE
    assert promises.when_infeasible({"slo_tier": "gold"}) is OnInfeasible.SERVE
    assert promises.when_infeasible({"slo_tier": "batch"}) is OnInfeasible.RELEGATE
    asked = {"slo_tier": "batch", "on_infeasible": "reject"}
    assert promises.when_infeasible(asked) is OnInfeasible.REJECT
    with pytest.raises(BadPromiseError, match="on_infeasible 'later' is none of reject"):
        promises.when_infeasible({"on_infeasible": "later"})


def test_an_unknown_tier_is_refused_with_those_there_are() -> None:
    with pytest.raises(BadPromiseError, match=r"silver.*gold"):
        PROMISES.of({"slo_tier": "silver"})


def test_settings_take_seconds_and_durations_and_default_to_no_promise() -> None:
    section = {"slo_ttft_s": "500ms", "slo_tiers": {"gold": {"slo_tpot_s": 0.02}}}
    settings = read_settings({"slosched": section, "of others": 1})
    promises = settings.make_promises()
    assert promises.default == SLO(0.5, NO_SLO.tpot_s)
    assert promises.tiers == {"gold": SLO(NO_SLO.ttft_s, 0.02)}
    assert settings.deadline_rule is DeadlineRule.MEAN_TPOT
    assert read_settings({}).make_promises() == Promises()
    assert read_settings({"slosched": {"deadline_rule": "tbt"}}).deadline_rule is DeadlineRule.TBT


@pytest.mark.parametrize(
    ("section", "complaint"),
    [
        ("goodput", "must be an object"),
        ({"slo_ttft": 1}, "did you mean slo_ttft_s"),
        ({"slo_ttft_s": True}, "must be a time"),
        ({"slo_tiers": {"gold": 3}}, "slo_tiers.gold must be an object"),
        ({"slo_tiers": ["gold"]}, "slo_tiers must be an object of tiers by name"),
        ({"any_device": "False"}, "any_device must be true or false, not 'False'"),
        ({"emulate_async": "no"}, "emulate_async must be true or false, not 'no'"),
        ({"emulate_slowdown": True}, "emulate_slowdown must be a factor"),
        ({"policy": None}, "policy must be text, not None"),
        ({"profile": 3}, "profile must be text, not 3"),
        ({"emulate": True}, "emulate must be text, not True"),
        ({"record": True}, "record must be the name of a file, not True"),
        ({"shadow": 3}, "the name of a folder, not 3"),
        ({"shadow": ""}, "the name of a folder, not ''"),
        ({"shadow": "False"}, "the name of a folder, not 'False'"),
        ({"shadow": True, "record": "steps.csv"}, "leave out slosched.record"),
    ],
)
def test_wrong_settings_are_named(section: object, complaint: str) -> None:
    with pytest.raises(SettingsError, match=complaint):
        read_settings({"slosched": section})


def test_a_policy_that_cannot_plan_without_a_latency_model_is_refused() -> None:
    settings = read_settings({"slosched": {"policy": "goodput"}})
    with pytest.raises(SettingsError, match=r"slosched\.profile"):
        settings.make_policy(None, Limits())
    named = read_settings({"slosched": {"policy": "goodput", "profile": "rtx4090/llama-3.1-8b"}})
    assert named.make_policy(named.make_model("NVIDIA GeForce RTX 4090"), Limits())
    with pytest.raises(SettingsError, match='"any_device": true'):
        named.make_model("cpu")


def test_a_step_begins_after_those_in_flight_and_teaches_the_model() -> None:
    seen: list[float] = []

    class Listening(LinearModel):
        def observe(self, shape: BatchShape, seconds: float) -> None:
            seen.append(seconds)

    steps = StepTimes(Listening(LinearCoefficients(0, 0, 0, 0, 0, 0, constant_s=0.1)))
    chunks = ((1, 7),)
    assert steps.next_begins_s(5.0) == 5.0
    steps.launched(1, chunks, 5.0)
    assert steps.next_begins_s(5.02) == pytest.approx(5.1)
    steps.launched(1, chunks, 5.02)
    assert steps.num_in_flight == 2
    assert steps.next_begins_s(5.02) == pytest.approx(5.2)
    steps.returned(5.12)
    assert steps.next_begins_s(5.13) == pytest.approx(5.22)
    steps.returned(5.2)
    assert seen == pytest.approx([0.12, 0.08])


@pytest.mark.parametrize(
    ("executed", "reached", "found"),
    [
        ({"a": 5, "b": 1}, False, []),
        ({"a": 4, "b": 1}, False, [Divergence.LESS]),
        ({"a": 4, "b": 1}, True, []),
        ({"b": 1}, True, [Divergence.LESS]),
        ({"a": 6, "b": 1}, False, [Divergence.MORE]),
        ({"a": 5, "b": 1, "c": 2}, False, [Divergence.UNPLANNED]),
        ({"a": 5, "b": 3}, False, []),
    ],
)
def test_executed_steps_are_compared_with_their_plans(
    executed: dict[str, int], reached: bool, found: list[Divergence]
) -> None:
    truth = Truth()
    drafts = {"b": [7, 7]} if executed.get("b") == 3 else {}
    output = SimpleNamespace(
        num_scheduled_tokens=executed, scheduled_spec_decode_tokens=drafts, preempted_req_ids=set()
    )
    truth.compare({"a": 5, "b": 1}, output, lambda *_: reached)
    assert sorted(truth.divergences) == found
    assert truth.num_diverged_steps == bool(found)
    assert truth.num_steps == 1


@pytest.mark.parametrize(
    ("granted", "max_num_tokens", "found"),
    [
        ({"b": 4, "a": 6}, 10, []),  # three drafts of `b` took the room of three tokens of `a`
        ({"b": 4, "a": 6}, 16, [Divergence.LESS]),  # there was room for all
        ({"b": 4, "a": 5}, 9, [Divergence.LESS]),  # more is missing than there are drafts
        ({"b": 4, "a": 6, "c": 1}, 11, [Divergence.UNPLANNED]),
    ],
)
def test_what_drafts_take_from_a_full_step_is_no_divergence(
    granted: dict[str, int], max_num_tokens: int, found: list[Divergence]
) -> None:
    truth = Truth(max_num_tokens=max_num_tokens)
    output = SimpleNamespace(
        num_scheduled_tokens=granted,
        total_num_scheduled_tokens=sum(granted.values()),
        scheduled_spec_decode_tokens={"b": [7, 7, 7]},
        preempted_req_ids=set(),
    )
    assert not truth.compare({"b": 1, "a": 9}, output, lambda *_: False)
    assert sorted(truth.divergences) == found
    assert truth.num_cut_by_drafts == (Divergence.LESS not in found)


def test_policies_and_emulated_devices_take_the_servers_time_for_each_step(tmp_path: Path) -> None:
    """vLLM plans ahead of the device, so the host's time is hidden."""
    model = LinearModel(
        LinearCoefficients(0, 0, 0, 0, 0, 0, 0.5), server_time=ServerTime(0.25, 0.125, 1.0)
    )
    path = tmp_path / "model.json"
    save_model(model, path)
    step = BatchShape()
    step.add(1, 10)
    policies = read_settings({"slosched": {"profile": str(path)}}).make_model("any device")
    device = read_settings({"slosched": {"emulate": str(path), "emulate_slowdown": 2}})
    emulated = device.make_device()
    assert policies is not None
    assert emulated is not None
    assert (policies.predict(step), emulated.predict(step)) == (0.625, 1.25)
    assert policies.server_time.per_request_s == emulated.server_time.per_request_s == 0.25


@pytest.mark.parametrize(
    ("tenant", "complaint"),
    [
        ({"key_sha256": "sk-acme"}, "and not the key itself"),
        ({"key_sha256": "0" * 64, "slo_tier": "gold"}, "none of slosched.slo_tiers: silver"),
        ({"key": "sk-acme"}, "acme must be an object with key_sha256"),
    ],
)
def test_a_tenant_that_is_not_one_is_an_error_at_start(
    tenant: dict[str, str], complaint: str
) -> None:
    section = {"slo_tiers": {"silver": {}}, "tenants": {"acme": tenant}}
    with pytest.raises(SettingsError, match=complaint):
        read_settings({"slosched": section})


def test_where_tenants_have_keys_a_name_proves_nothing() -> None:
    digest = "0" * 64  # what the middleware writes for a request that brings the key
    section = {"tenants": {"acme": {"key_sha256": digest}}}
    promises = read_settings({"slosched": section}).make_promises()
    assert promises.tenant_of({"slo_tenant": digest}) == "acme"
    for said in (None, {}, {"slo_tenant": "acme"}, {"slo_tenant": [digest]}, {"slo_tenant": 0}):
        assert promises.tenant_of(said) is None
    assert PROMISES.tenant_of({"slo_tenant": "acme"}) == "acme"
    assert PROMISES.tenant_of(None) is None
