"""`--engine vllm`: the command that it runs, and what it refuses; the tests need no vLLM."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest
from command_line import Said

from slosched.cli import vllm
from slosched.core import NO_SLO, SLO, OnInfeasible
from slosched.integrations.vllm.hooks import TESTED_VERSIONS, Installed
from slosched.integrations.vllm.settings import read_settings
from slosched.perfmodel import load_model, save_model

Cli = Callable[..., Said]
Commands = list[list[str]]


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Commands:
    """Return the list that gets the commands which would replace this process.

    A tested version of vLLM seems to be installed.
    """
    commands: Commands = []
    tested = Installed("vllm", TESTED_VERSIONS[-1])
    monkeypatch.setattr(vllm, "installed_version", lambda: tested)

    def leave(_: str, command: list[str]) -> NoReturn:
        commands.append(command)
        raise SystemExit(0)

    monkeypatch.setattr(os, "execv", leave)
    return commands


def following(command: list[str], option: str) -> str:
    return command[command.index(option) + 1]


def test_serve_is_short_for_vllms_own_command(cli: Cli, ran: Commands, tmp_path: Path) -> None:
    model = tmp_path / "h100.json"
    save_model(load_model("h100/llama-3.1-8b"), model)
    typed = "serve --engine vllm org/model --slo-ttft 1s --slo-tpot 50ms --policy edf --port 8123 "
    typed += "--latency-model h100.json --max-num-seqs 64 -- --tensor-parallel-size 2"
    assert cli(*typed.split()).status == 0
    [command] = ran
    assert following(command, "--model") == "org/model"
    assert following(command, "--port") == "8123"
    assert following(command, "--scheduler-cls") == "slosched.integrations.vllm.SLOScheduler"
    assert following(command, "--middleware") == "slosched.integrations.vllm.SLOMiddleware"
    assert following(command, "--max-num-seqs") == "64"
    assert "--max-num-batched-tokens" not in command, "what is not given is vLLM's to choose"
    assert "--distributed-executor-backend" not in command
    assert command[-2:] == ["--tensor-parallel-size", "2"]
    settings = read_settings(json.loads(following(command, "--additional-config")))
    assert (settings.policy, settings.slo_ttft_s, settings.slo_tpot_s) == ("edf", 1.0, 0.05)
    assert settings.profile == str(model)


def test_tiers_and_what_becomes_of_an_slo_that_cannot_be_kept(cli: Cli, ran: Commands) -> None:
    typed = "serve --engine vllm org/model --emulate h100/llama-3.1-8b --on-infeasible serve "
    typed += "--tier gold=ttft:300ms,tpot:30ms,e2e:9s "
    typed += "--tier batch=ttft:30s,best-effort,min-share:0.1"
    assert cli(*typed.split()).status == 0
    settings = read_settings(json.loads(following(ran[0], "--additional-config")))
    assert settings.policy == "goodput+floors:tiers=batch=0.1+door"
    promises = settings.make_promises()
    assert promises.tiers == {"gold": SLO(0.3, 0.03, 9.0), "batch": SLO(30.0, NO_SLO.tpot_s)}
    assert promises.when_infeasible({"slo_tier": "gold"}) is OnInfeasible.SERVE
    assert promises.when_infeasible({"slo_tier": "batch"}) is OnInfeasible.RELEGATE


def test_a_tenant_is_refused_with_what_vllm_has_instead(cli: Cli, ran: Commands) -> None:
    said = cli("serve", "--engine", "vllm", "org/model", "-p", "fcfs", "--tenant", "acme=KEY")
    assert said.status == 1
    assert "in vLLM the setting `tenants` of the long form names tenants" in said.complaint
    assert not ran


def test_an_emulated_device_brings_its_executor(cli: Cli, ran: Commands) -> None:
    typed = "serve --engine vllm --model org/model --emulate h100/llama-3.1-8b"
    assert cli(*typed.split()).status == 0
    assert following(ran[0], "--distributed-executor-backend").endswith(".EmulatedExecutor")
    settings = read_settings(json.loads(following(ran[0], "--additional-config")))
    assert settings.emulate == "h100/llama-3.1-8b"


def test_an_untested_vllm_is_refused_unless_forced(
    cli: Cli, ran: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm, "installed_version", lambda: Installed("vllm", "0.1"))
    words = ("serve", "--engine", "vllm", "org/model", "--policy", "fcfs")
    said = cli(*words)
    assert said.status == 1
    assert "vllm 0.1 is not among" in said.complaint
    assert not ran
    assert cli(*words, "--force").status == 0
    assert ran


def test_what_vllm_would_refuse_later_is_refused_at_once(cli: Cli, ran: Commands) -> None:
    words = ("serve", "--engine", "vllm", "org/model")
    said = cli(*words, "--policy", "goodput")
    assert said.status == 1
    assert "'goodput' needs a latency model" in said.complaint
    assert "slosched profile --engine vllm" in said.complaint
    assert "no policy 'gooodput'" in cli(*words, "--policy", "gooodput").complaint
    said = cli(*words, "--policy", "fcfs", "--latency-model", "none/such")
    assert "no latency model" in said.complaint
    assert not ran


@pytest.mark.parametrize(
    "flag",
    [
        "--overlap",
        "--threads 2",
        "--prefix-cache hash",
        "--kv-tokens 1000",
        "--graph-sizes 1,2",
        "--hang-timeout 5s",
        "--admin-api-key secret",
        "--torch-profiler-dir profiles",
        "--log-format json",
        "--log-interval 5s",
        "--log-requests",
        "--otlp-traces-endpoint http://localhost:4317",
    ],
)
def test_options_of_our_own_engine_are_refused(cli: Cli, ran: Commands, flag: str) -> None:
    said = cli(*f"serve --engine vllm org/model {flag}".split())
    assert said.status == 1
    assert f"{flag.split()[0]} is for slosched's own engine" in said.complaint
    assert not ran


@pytest.mark.parametrize("from_variable", [False, True])
def test_vllm_asks_for_the_key_which_its_command_does_not_show(
    cli: Cli, ran: Commands, monkeypatch: pytest.MonkeyPatch, from_variable: bool
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "an older one")
    words = ("serve", "--engine", "vllm", "org/model", "--policy", "fcfs")
    if from_variable:
        monkeypatch.setenv("SLOSCHED_API_KEY", "secret")
    else:
        words += ("--api-key", "secret")
    said = cli(*words)
    assert said.status == 0, said.complaint
    assert os.environ["VLLM_API_KEY"] == "secret"
    assert "secret" not in " ".join([*ran[0], said.out])


def test_several_keys_are_for_vllms_own_option(cli: Cli, ran: Commands) -> None:
    words = ("serve", "--engine", "vllm", "org/model", "--policy", "fcfs")
    said = cli(*words, "--api-key", "one", "--api-key", "two")
    assert said.status == 1
    assert "-- --api-key KEY KEY" in said.complaint
    assert not ran


@pytest.mark.parametrize("command", ["serve", "profile"])
def test_without_vllm_it_says_how_to_get_it(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setattr(vllm, "installed_version", lambda: None)
    said = cli(command, "--engine", "vllm")
    assert said.status == 1
    assert "pip install vllm" in said.complaint


@pytest.mark.parametrize("command", ["serve", "profile"])
def test_vllms_options_are_for_vllm(cli: Cli, command: str) -> None:
    said = cli(command, "tiny-random", "--", "--foo", "1")
    assert said.status == 1
    assert "--foo 1 is for --engine vllm" in said.complaint
