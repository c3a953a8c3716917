"""The files in deploy/ for vLLM, as far as they can be checked without vLLM, Helm or containers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from slosched.core import EndReason
from slosched.integrations.vllm.hooks import TESTED_VERSIONS
from slosched.integrations.vllm.settings import Settings, read_settings
from slosched.integrations.vllm.truth import Divergence, Fallback
from slosched.policy.spec import make_policy

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
CONTAINERFILE = (DEPLOY / "vllm" / "Containerfile").read_text("utf-8")
VALUES = ("values", "values-shadow")
KINDS = {
    "step": {"planned", "diverged"},
    "divergence": set(Divergence),
    "fallback": set(Fallback),
    "rejection": set(EndReason),
}
"""The kinds of each event, as truth.py counts them."""


def model_spec(name: str) -> dict[str, Any]:
    values = yaml.safe_load((DEPLOY / "vllm" / f"{name}.yaml").read_text("utf-8"))
    [spec] = values["servingEngineSpec"]["modelSpec"]
    assert isinstance(spec, dict)
    return spec


def settings_of(name: str) -> Settings:
    words = model_spec(name)["vllmConfig"]["extraArgs"]
    return read_settings(json.loads(words[words.index("--additional-config") + 1]))


def test_the_image_is_of_a_tested_version_and_takes_files_that_exist() -> None:
    [version] = re.findall(r"^ARG VLLM=v(.*)$", CONTAINERFILE, re.MULTILINE)
    assert version in TESTED_VERSIONS
    copies = [line.split()[1:-1] for line in CONTAINERFILE.splitlines() if line.startswith("COPY")]
    copied = [source for copy in copies for source in copy]
    assert "slosched" in copied
    kept = (DEPLOY / "vllm" / "Containerfile.dockerignore").read_text().splitlines()
    for source in copied:
        assert (ROOT / source).exists(), source
        assert f"!{source}" in kept, "else the builder does not see it"
    assert {model_spec(name)["tag"] for name in VALUES} == {f"v{version}"}


@pytest.mark.parametrize("name", VALUES)
def test_the_values_have_settings_that_slosched_accepts(name: str) -> None:
    settings = settings_of(name)
    make_policy(settings.policy)
    promise = settings.make_promises().default
    assert (promise.ttft_s, promise.tpot_s) == (1.0, 0.05)


def test_shadow_mode_writes_to_storage_that_stays_and_only_it_lets_vllm_decide() -> None:
    assert model_spec("values-shadow")["pvcStorage"]
    assert settings_of("values-shadow").shadow_folder.is_relative_to("/data")
    assert settings_of("values").shadow is False


def test_the_latency_model_lies_where_the_volume_is_mounted() -> None:
    spec = model_spec("values")
    [mount], [volume] = spec["extraVolumeMounts"], spec["extraVolumes"]
    assert mount["name"] == volume["name"]
    profile = settings_of("values").profile
    assert profile == f"{mount['mountPath']}/model.json"
    comment = (DEPLOY / "vllm" / "values.yaml").read_text("utf-8")
    assert f"configmap {volume['configMap']['name']} --from-file=model.json" in comment


def queries(path: Path) -> list[str]:
    if path.suffix == ".json":
        panels = json.loads(path.read_text("utf-8"))["panels"]
        return [target["expr"] for panel in panels for target in panel["targets"]]
    groups = yaml.safe_load(path.read_text("utf-8"))["groups"]
    return [rule["expr"] for group in groups for rule in group["rules"]]


@pytest.mark.parametrize("name", ["grafana/slosched-in-vllm.json", "prometheus/vllm-alerts.yaml"])
def test_dashboard_and_alerts_ask_for_events_that_are_counted(name: str) -> None:
    asked = "\n".join(queries(DEPLOY / name))
    selected = re.findall(r'event=~?"([\w|]+)"(?:, kind="(\w+)")?', asked)
    assert len(selected) >= 5
    for events, kind in selected:
        for event in events.split("|"):
            assert event in KINDS
            assert not kind or kind in KINDS[event]


def test_the_alert_on_plans_that_fail_needs_none_that_did_not() -> None:
    """A policy that fails from the first step on leaves "planned" uncounted, so without a series."""
    [group] = yaml.safe_load((DEPLOY / "prometheus" / "vllm-alerts.yaml").read_text())["groups"]
    [expr] = [rule["expr"] for rule in group["rules"] if rule["alert"] == "PlansFail"]
    for part in expr.split("/"):
        [events] = re.findall(r'event=~?"([\w|]+)"', part)
        assert "fallback" in events.split("|")
        assert 'kind="' not in part


def test_every_file_that_the_page_names_exists() -> None:
    page = (ROOT / "docs" / "how-to" / "run-it-in-vllm.md").read_text("utf-8")
    named = set(re.findall(r"deploy/[\w./-]+\w", page))
    assert {"deploy/vllm/Containerfile", "deploy/vllm/values.yaml"} <= named
    for path in named:
        assert (ROOT / path).exists(), path
