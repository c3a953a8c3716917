"""Tests of the experiment inside vLLM, as far as they need no vLLM: commands, tables and page."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from experiments.inside_vllm import report
from experiments.inside_vllm.compare import gains, mean_of, prediction_errors, same_ranking
from experiments.inside_vllm.device import is_measured
from experiments.inside_vllm.heats import Heat, Row, heats_to_run, scores
from experiments.inside_vllm.predict import (
    Stretch,
    fitted,
    num_steps,
    predicted,
    with_server_time,
)
from experiments.inside_vllm.results import PREDICTIONS, RUNS, TUNING, Book
from experiments.inside_vllm.session import Session, seconds_of
from experiments.inside_vllm.setups import SETUPS, TRACES, Setup, System, smoke
from slosched.core import SLO, EndReason, RequestStatus
from slosched.integrations.vllm.settings import read_settings
from slosched.metrics import RequestRecord
from slosched.perfmodel import (
    NO_SERVER_TIME,
    FittedModel,
    Measurement,
    Profile,
    ServerTime,
    save_model,
    write_profile,
)
from slosched.perfmodel.device import cpu_name
from slosched.perfmodel.forms import described
from slosched.perfmodel.measurement import Chunk
from slosched.perfmodel.server_time import SERVER_TIME_ORIGIN

CONV = SETUPS["conv-h100"]
needs_traces = pytest.mark.skipif(not TRACES.exists(), reason=f"{TRACES} is not there")


def row(system: str, window: int, num_good: int, *, late_s: float = 0.0, rate: float = 20.0) -> Row:
    return {
        "setup": CONV.name,
        "rate": rate,
        "window": window,
        "system": system,
        "num_offered": 100,
        "num_good": num_good,
        "num_rejected": 0,
        "num_aborted": 0,
        "attainment": num_good / 100,
        "good_requests_per_s": rate * num_good / 100,
        "ttft_p50_s": 0.1,
        "ttft_p99_s": 0.2,
        "tpot_p50_s": 0.01,
        "tpot_p99_s": 0.02,
        "tokens_per_s": 1.0,
        "num_late_sends": 0,
        "max_lateness_s": late_s,
        "errors": "",
        "api_busy": 0.1,
        "engine_busy": 0.1,
        "api_waited": 0.0,
        "engine_waited": 0.0,
        "wall_s": 1.0,
        "slowdown": CONV.slowdown,
        "max_num_batched_tokens": 2048,
        "machine": "a computer",
        "first_step": 0,
        "per_request_s": 0.031,
        "per_step_host_s": 0.0,
        "num_steps": 0,
        "code_digest": "abc",
        "made": "2026-01-01",
    }


@pytest.mark.parametrize("name", SETUPS)
def test_every_server_is_started_with_settings_that_slosched_reads(name: str) -> None:
    setup = SETUPS[name]
    for system in (*setup.untuned, *setup.systems(setup.budgets[0])):
        command = setup.launch(system, Path("steps.csv")).command(8000)
        said = json.loads(command[command.index("--additional-config") + 1])
        settings = read_settings(said)
        assert ("--scheduler-cls" in command) is (system.policy is not None)
        assert (settings.emulate is not None) is setup.is_emulated
        if system.policy is not None:
            assert settings.policy == system.policy
            device = setup.model.provenance.get("device", "NVIDIA H100")
            assert settings.make_model(device) is not None
        budget = command[command.index("--max-num-batched-tokens") + 1]
        assert int(budget) == system.max_num_batched_tokens >= setup.max_num_seqs


@needs_traces
def test_slow_motion_changes_nothing_but_the_clock() -> None:
    fast, slow = (replace(CONV, slowdown=factor, num_requests=30) for factor in (1.0, 4.0))
    ours, slowed = fast.load(20.0, 1), slow.load(20.0, 1)
    assert slowed.duration_s == pytest.approx(4 * ours.duration_s)
    for a, b in zip(ours.requests, slowed.requests, strict=True):
        assert (a.num_prompt_tokens, a.num_output_tokens) == (
            b.num_prompt_tokens,
            b.num_output_tokens,
        )
        assert b.slo.ttft_s == pytest.approx(4 * a.slo.ttft_s)
        assert b.slo.tpot_s == pytest.approx(4 * a.slo.tpot_s)
    system = System(2048)
    rows = [predicted(Heat(setup, 20.0, 1), system, setup.model) for setup in (fast, slow)]
    for name in ("num_good", "good_requests_per_s", "ttft_p99_s", "tpot_p99_s"):
        assert rows[1][name] == pytest.approx(rows[0][name], rel=1e-6)


def test_scores_are_the_devices() -> None:
    slo = SLO(1.0, 1.0)
    done = RequestStatus.FINISHED, EndReason.LENGTH
    records = [
        RequestRecord(f"r{i}", float(i), 8, 2, slo, *done, (i + 0.4, i + 0.8), i + 0.8)
        for i in range(5)
    ]
    found = scores(replace(CONV, slowdown=4.0), records)
    assert found["num_good"] == 5
    assert found["ttft_p50_s"] == pytest.approx(0.1)
    assert found["good_requests_per_s"] == pytest.approx(4.0)


def test_what_is_measured_is_kept_and_what_a_busy_machine_made_does_not_count(
    tmp_path: Path,
) -> None:
    book = Book(tmp_path)

    def has(window: int) -> bool:
        return book.has(RUNS, CONV.name, 20.0, window)

    assert not has(0)
    book.keep_heat(RUNS, [row("goodput", 0, 90), row("vLLM 2048", 0, 50)])
    book.keep_heat(RUNS, [row("goodput", 1, 80, late_s=0.3), row("vLLM 2048", 1, 50)])
    assert has(0)
    assert not has(1), "one late client spoils the whole heat"
    assert Book(tmp_path, max_lateness_s=1.0).has(RUNS, CONV.name, 20.0, 1)
    book.keep_heat(RUNS, [row("goodput", 1, 85), row("vLLM 2048", 1, 55)])
    assert has(1)
    assert len(book.read(RUNS)) == 4
    later = Book(tmp_path, since="2026-01-02")
    assert not later.has(RUNS, CONV.name, 20.0, 0)
    heats = heats_to_run(smoke(CONV), 2)
    assert [heat.window for heat in heats] == [0, 1]
    assert Session(later).missing(RUNS, heats) == heats
    later.keep_heat(RUNS, [row("goodput", 0, 91) | {"made": "2026-01-03"}])
    assert later.has(RUNS, CONV.name, 20.0, 0)
    assert len(book.read(RUNS)) == 3, "a heat that is measured anew replaces the old one whole"


def test_runs_against_another_budget_of_vllms_are_not_shown_beside_the_others(
    tmp_path: Path,
) -> None:
    book = Book(tmp_path)
    assert book.shown().empty
    for window, budget in enumerate((512, 1024, 1024)):
        book.keep_heat(RUNS, [row(f"vLLM {budget}", window, 50), row("goodput", window, 90)])
    shown = book.shown()
    assert sorted(shown["window"]) == [1, 1, 2, 2]
    assert set(shown["system"]) == {"vLLM 1024", "goodput"}


def test_when_the_time_is_up_no_server_is_started_and_nothing_is_asked_for(tmp_path: Path) -> None:
    session = Session(Book(tmp_path), tmp_path, until_s=0.0)
    session.tune(CONV, 1)
    session.run(CONV, 1)  # vLLM is not tuned, which is an error while there is time
    session.simulate(CONV, refit=True)
    assert not list(tmp_path.iterdir())


def test_how_long_it_takes_is_said_before() -> None:
    setup = replace(CONV, rates=(20.0,), num_requests=200, slowdown=4.0)
    [heat] = Session(Book(Path("no-such-folder"))).missing(RUNS, heats_to_run(setup, 1))
    assert 60 + 40 < seconds_of([], [heat]) < 60 + 40 + 60
    assert seconds_of([heat], [heat]) == 2 * seconds_of([], [heat])
    assert seconds_of([], []) == 0
    real = replace(heat, setup=replace(setup, is_emulated=False))
    assert seconds_of([], [real]) > seconds_of([], [heat]), "one after the other"


@pytest.mark.slow
def test_a_model_is_fitted_to_the_steps_of_the_runs_that_count(tmp_path: Path) -> None:
    device, path = CONV.model, tmp_path / "steps.csv"
    assert num_steps(path) == 0
    batches: list[tuple[Chunk, ...]] = [((1, 100 * i), (64 * i, 0)) for i in range(1, 40)]
    batches += [((1, 50 * i),) * i for i in range(1, 40)]
    took_s = [device.predict(Measurement(chunks, 1.0).shape) for chunks in batches]
    rows = [Measurement(chunks, took) for chunks, took in zip(batches, took_s, strict=True)]
    disturbed = [replace(row, seconds=5 * row.seconds) for row in rows]
    write_profile(Profile((*disturbed, *rows, *disturbed), {}), path)
    assert num_steps(path) == 3 * len(rows)
    for first, factor in ((0, 5.0), (len(rows), 1.0)):
        model = fitted([Stretch(path, first, len(rows))]).model
        found_s = [model.predict(row.shape) for row in rows]
        assert found_s == pytest.approx([factor * took for took in took_s], rel=0.1)


def served(setup: Setup, times: ServerTime) -> FittedModel:
    model = setup.model
    return described(model, model.provenance, model.held_out_error, server_time=times)


@needs_traces
def test_a_server_that_hands_tokens_on_late_breaks_promises_and_is_found_out() -> None:
    setup = replace(CONV, num_requests=60)
    heat, system = Heat(setup, 40.0, 0), System(2048)

    def guess(device: FittedModel) -> list[Row]:
        return [predicted(heat, system, device)]

    [late] = guess(served(setup, ServerTime(per_request_s=2.0)))
    [prompt] = guess(setup.model)
    assert int(str(late["num_good"])) < int(str(prompt["num_good"]))
    assert late["tpot_p99_s"] == pytest.approx(prompt["tpot_p99_s"])
    found = with_server_time(setup.model, setup, [dict(late)], guess)
    assert found.server_time.per_request_s == pytest.approx(2.0)
    assert found.server_time.per_step_host_s == 0.0, "vLLM plans ahead of an emulated device"
    assert found.provenance[SERVER_TIME_ORIGIN].startswith("learnt from the 1 runs at 40/s")
    early = with_server_time(served(setup, NO_SERVER_TIME), setup, [dict(prompt)], guess)
    assert early.server_time == NO_SERVER_TIME


@needs_traces
def test_the_hosts_time_is_what_makes_runs_take_longer_where_nothing_hides_it() -> None:
    setup = SETUPS["conv-cpu"]
    heat, system = Heat(setup, 4.0, 1), System(128)

    def guess(device: FittedModel) -> list[Row]:
        return [predicted(heat, system, device)]

    [slow] = guess(served(setup, ServerTime(0.03, per_step_host_s=0.02)))
    found = with_server_time(setup.model, setup, [dict(slow)], guess).server_time
    assert found.per_step_host_s == pytest.approx(0.02, rel=0.1)
    assert found.per_request_s == pytest.approx(0.03, abs=0.01)


def test_a_device_that_is_not_emulated_is_measured_before_it_is_used(tmp_path: Path) -> None:
    assert is_measured(CONV), "an emulated one is as its latency model says"
    path = tmp_path / "device.json"
    setup = replace(SETUPS["conv-cpu"], latency_model=str(path))
    assert not is_measured(setup)
    for device, is_this in (("another processor", False), (cpu_name(), True)):
        save_model(replace(CONV.model, provenance={"device": device}), path)
        assert is_measured(setup) is is_this


def test_the_best_budget_is_that_of_the_best_mean(tmp_path: Path) -> None:
    book = Book(tmp_path)
    with pytest.raises(ValueError, match="not tuned"):
        book.best_budget(CONV.name)
    rows = []
    for budget, rate, num_good in [(512, 20, 80), (512, 40, 60), (2048, 20, 95), (2048, 40, 50)]:
        one = row(f"vLLM {budget}", 20, num_good, rate=rate)
        rows.append(one | {"max_num_batched_tokens": budget})
    book.keep(TUNING, rows)
    assert book.best_budget(CONV.name) == 2048


def test_gains_are_paired_and_predictions_are_compared() -> None:
    rows = []
    for window, (own, ours) in enumerate([(10, 31), (50, 70), (90, 99)]):
        rows += [row("vLLM 2048", window, own), row("goodput", window, ours)]
    runs = pd.DataFrame(rows)
    [gain] = gains(runs)
    assert (gain.rate, gain.system) == (20.0, "goodput")
    assert gain.more.value == pytest.approx(20 * (0.21 + 0.20 + 0.09) / 3)
    assert gain.times == pytest.approx(200 / 150)
    spread = mean_of(runs[runs["system"] == "goodput"]["good_requests_per_s"].to_numpy(float))
    assert gain.more.reach < spread.reach, "the parts differ more than the schedulers"
    guesses = pd.DataFrame([r | {"attainment": float(str(r["attainment"])) - 0.04} for r in rows])
    errors = prediction_errors(runs, guesses)
    assert errors["points"].to_list() == pytest.approx([-4.0, -4.0])
    assert same_ranking(errors)
    errors["attainment_predicted"] = 1 - errors["attainment_predicted"]
    assert not same_ranking(errors)


def test_the_page_is_made_of_the_results(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing is measured"):
        report.write(tmp_path / "page.md", Book(tmp_path))
    for window in range(3):
        rows = [row("vLLM 2048", window, 50 + window), row("goodput", window, 90 + window)]
        Book(tmp_path).keep(RUNS, rows)
        Book(tmp_path).keep(PREDICTIONS, rows)
    report.write(tmp_path / "page.md", Book(tmp_path), Book(tmp_path / "virtual"))
    page = (tmp_path / "page.md").read_text()
    assert "surely more" in page
    assert "2 of 2 mean attainments are within 5 points" in page
    assert "31 ms a request" in page
    assert "virtual time" not in page
    assert (tmp_path / "page" / "goodput.svg").stat().st_size > 1000


def test_the_committed_page_is_that_of_the_committed_results(tmp_path: Path) -> None:
    report.write(tmp_path / "inside_vllm.md")
    assert (tmp_path / "inside_vllm.md").read_text() == report.PAGE.read_text()
