"""Tests of the comparison with real engines: its load, its judging, and its page."""

from __future__ import annotations

import json
import math
import subprocess
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from experiments.fidelity import demo_runs, full, models, report, results, sharegpt
from experiments.fidelity.collect import collect
from experiments.fidelity.judge import judge, learn_per_request_s
from experiments.fidelity.load import BLOCK_SIZE, stage_of, trace_of
from experiments.fidelity.play import play
from experiments.fidelity.stages import Run, Stage, read_runs, write_stages


def run_named(text: str) -> Run:
    return next(run for run in read_runs() if text in run[0].run)


def shortened(run: Run, duration_s: float) -> Run:
    return tuple(replace(stage, duration_s=duration_s) for stage in run)


def test_the_page_is_that_of_the_results(tmp_path: Path) -> None:
    report.write(tmp_path / "fidelity.md")
    assert (tmp_path / "fidelity.md").read_text() == report.PAGE.read_text()
    assert (tmp_path / "fidelity" / "errors.svg").exists()


def test_a_demo_is_added_to_the_runs_and_replaces_one_of_its_name(tmp_path: Path) -> None:
    agreement, runs = tmp_path / "agreement.csv", tmp_path / "runs.csv"
    rows = pd.DataFrame({"policy": ["fcfs"], "live": [0.5], "simulated_mean": [0.53]})
    rows.to_csv(agreement, index=False)
    demo_runs.collect(agreement, "first", "a laptop", runs)
    demo_runs.collect(agreement, "second", "a laptop", runs)
    rows.assign(live=0.6).to_csv(agreement, index=False)
    demo_runs.collect(agreement, "second", "a server", runs)
    read = demo_runs.read(runs)
    assert [*read["run"]] == ["first", "second"]
    assert [*read["machine"]] == ["a laptop", "a server"]
    assert [*read["points"]] == pytest.approx([3.0, -7.0])


def test_every_run_whose_operators_are_in_the_tables_is_simulated() -> None:
    stages = results.compared()
    simulated = set(stages[stages["is_chosen"]]["run"])
    for run in read_runs():
        server = models.Server(run[0].model, run[0].tensor_parallel)
        assert (run[0].run in simulated) == models.has_tables(server), run[0].run


def test_measured_stages_survive_being_written(tmp_path: Path) -> None:
    runs = read_runs()
    write_stages([stage for run in runs for stage in run], tmp_path / "stages.csv")
    assert str(read_runs(tmp_path / "stages.csv")) == str(runs)


def test_the_load_is_a_hundred_prompts_in_turn_from_the_first_one_in_every_stage() -> None:
    run = shortened(run_named("llama-2-7b-tp1-general"), 30.0)
    trace = trace_of(run)
    for stage in run:
        of_stage = [r for r in trace.requests if stage_of(r.request_id) == stage.stage]
        assert len(of_stage) == 30 * stage.rate_per_s
        first, again = of_stage[:100], of_stage[100:200]
        assert len({r.prefix_hashes for r in first}) == 100
        assert [r.prefix_hashes for r in again] == [r.prefix_hashes for r in first[: len(again)]]
        assert first[0].prefix_hashes == trace.requests[0].prefix_hashes
        lengths = [r.num_prompt_tokens for r in first]
        assert stage.prompt_min_tokens <= min(lengths) < max(lengths) <= stage.prompt_max_tokens
        num_shared = stage.system_prompt_tokens // BLOCK_SIZE
        assert len({r.prefix_hashes[:num_shared] for r in first}) == 10, "ten system prompts"
        gaps_s = np.diff([r.arrival_s for r in of_stage])
        assert 0.8 < gaps_s.std() / gaps_s.mean() < 1.2, "exponential gaps"


def test_the_second_stage_finds_the_prompts_of_the_first_one_in_the_cache() -> None:
    run = shortened(run_named("codellama-34b-tp2-codegen"), 10.0)
    seen = list(play(run, models.load(models.Server(run[0].model, 2), "vllm")))
    assert [s["num_succeeded"] for s in seen] == [50, 100]
    assert seen[0]["ttft_p50_s"] > seen[1]["ttft_p50_s"]


def test_a_short_part_of_a_stage_is_close_to_the_measured_one() -> None:
    """Play 40 s of a stage that nothing was learnt from: 12B on two GPUs."""
    run = shortened(run_named("mistral-nemo-12b-tp2-general"), 40.0)[:1]
    [stage] = run
    [first] = play(run, models.load(models.Server(stage.model, 2), "vllm"))
    tpot_s = (first["e2e_mean_s"] - first["ttft_mean_s"]) / (stage.output_tokens - 1)
    assert tpot_s == pytest.approx(stage.tpot_mean_s, rel=0.15)
    assert stage.ttft_mean_s / 2 < first["ttft_p50_s"] < stage.ttft_mean_s


def test_a_full_server_is_slowed_down_until_a_token_takes_as_long_as_measured() -> None:
    run = shortened(run_named("codellama-34b-tp2-reasoning"), 20.0)
    assert full.is_full(run)
    assert not full.is_full(run_named("codellama-34b-tp2-codegen"))
    model = models.load(models.Server(run[0].model, 2), "vllm")
    [first] = play(run, model)
    measured = replace(run[0], ttft_mean_s=100.0, e2e_mean_s=100.0 + 1.2 * _decoding_s(first))
    again = full.play_with_measured_steps((measured,), model)
    assert again["factor"] == pytest.approx(1.2)
    assert _decoding_s(again) == pytest.approx(1.2 * _decoding_s(first), rel=0.05)


def _decoding_s(seen: dict[str, float]) -> float:
    return seen["e2e_mean_s"] - seen["ttft_mean_s"]


def test_only_the_runs_to_learn_from_set_the_time_per_request() -> None:
    stages = results.compared()
    stages = stages[stages["is_chosen"]]
    learnt_s = learn_per_request_s(stages)
    assert 0 < learnt_s < 0.02
    judges = ~stages["run"].isin(results.LEARNT_FROM)
    other = stages.assign(ttft_p50_s=stages["ttft_p50_s"].where(~judges, 1.0))
    assert learn_per_request_s(other) == learnt_s
    assert (judge(stages, learnt_s)["is_judged"] == judges).all()


def test_errors_are_simulated_over_measured_with_the_time_per_request() -> None:
    stages = (
        results.compared().head(1).assign(e2e_mean_s=2.0, e2e_mean_s_sim=1.9, ttft_p50_s=math.nan)
    )
    [judged] = judge(stages, 0.02).to_dict("records")
    assert judged["e2e_mean_s_error"] == pytest.approx(-4.0)
    assert math.isnan(judged["ttft_p50_s_error"])


@pytest.mark.parametrize("run", sharegpt.RUNS, ids=lambda run: run.model)
def test_sharegpt_prompts_share_the_blocks_that_they_have_in_common(
    run: sharegpt.ShareGPTRun,
) -> None:
    frame = pd.read_csv(run.path)
    hashes = {int(r.request_id): r.prefix_hashes for r in sharegpt.trace_of(frame).requests}
    assert len(hashes) == len(frame) == 300
    some = frame[frame["like_prompt"] >= 0]
    assert len(some) > 10
    for row in some.to_dict("records"):
        mine, other = hashes[row["prompt"]], hashes[row["like_prompt"]]
        num_common = sum(1 for a, b in zip(mine, other, strict=False) if a == b)
        assert num_common == row["like_blocks"] > 0


@pytest.mark.slow
def test_the_simulator_serves_sharegpt_on_an_rtx_4090_as_vllm_does() -> None:
    """Nothing is fitted to the run.  It is overloaded and preempts, so that errors add up."""
    simulated = sharegpt.simulate_run(sharegpt.RUNS[0])
    for latency in ("ttft_mean_s", "ttft_p50_s", "tpot_mean_s", "e2e_mean_s"):
        assert simulated[f"{latency}_sim"] == pytest.approx(simulated[latency], rel=0.02), latency


@pytest.mark.slow
def test_a_model_of_unequal_contexts_serves_sharegpt_on_an_rtx_pro_6000_as_vllm_does() -> None:
    """The bundled model, of equal contexts, errs by more than twice as much."""
    run = sharegpt.RUNS[1]
    simulated = sharegpt.simulate_run(run, run.with_unequal_contexts)
    bundled = sharegpt.simulate_run(run)
    for latency, limit in (("ttft_mean_s", 0.06), ("tpot_mean_s", 0.03), ("e2e_mean_s", 0.04)):
        error, before = (abs(s[f"{latency}_sim"] / s[latency] - 1) for s in (simulated, bundled))
        assert error < limit, latency
        assert before > 2 * error, latency


def test_stages_are_collected_from_clones(tmp_path: Path) -> None:
    """Make three small repositories of the same shape as the real ones."""
    run = "20260101-000000-some-model-tp2-chat"
    latency = {"time_to_first_token": _summary(0.05), "request_latency": _summary(2.0)}
    seen = {"count": 9, "latency": latency, "prompt_len": {"min": 90.0, "max": 110.0}}
    prompt = {"system_prompt_len": 32, "question_len": 68, "output_len": 20}
    stage = {"rate": 3, "duration": 4}
    training = _repository(
        tmp_path / "training",
        {
            f"default_args/{run}/exp-config.yaml": "model: a/some-model\ntensor_parallelism: 2\n"
            "max_num_batched_tokens: 2048\nmax_num_seqs: 128\n",
            f"default_args/{run}/profile.yaml": json.dumps(
                {"data": {"shared_prefix": prompt}, "load": {"stages": [stage]}}
            ),
            f"default_args/{run}/results/stage_0_lifecycle_metrics.json": json.dumps(
                {"successes": seen, "failures": {"count": 3}}
            ),
        },
    )
    experiment = {
        "id": "60",
        "model": "b/other-model",
        "tp": 4,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 1024,
        "total_kv_blocks": 500,
        "workload": {"inference_perf": {"shared_prefix": prompt, "stages": [stage]}},
    }
    simulator = _repository(
        tmp_path / "simulator",
        {"testdata/trained_physics_iter29.json": json.dumps({"experiments": [experiment]})},
    )
    header = "exp_id,experiment_folder,workload,stage_index,metric_name,actual"
    values = {"e2e_mean": 3000.0, "ttft_mean": 60.0, "ttft_p99": 90.0}
    rows = [f"60,/x/60-other-model,chat,0,{name},{value}" for name, value in values.items()]
    validation = _repository(
        tmp_path / "validation",
        {"results_trainval/error_records.csv": "\n".join([header, *rows])},
    )
    first, second = collect(training, validation, simulator)
    assert (first.run, first.tensor_parallel, first.num_failed) == (run, 2, 3)
    assert (first.ttft_p50_s, first.e2e_mean_s, first.prompt_max_tokens) == (0.05, 2.0, 110)
    assert math.isnan(first.kv_blocks)
    assert math.isnan(second.ttft_p50_s)
    assert (second.run, second.kv_blocks, second.e2e_mean_s) == ("60-other-model", 500, 3.0)
    assert second.prompt_min_tokens == 100


def _summary(value: float) -> dict[str, float]:
    return dict.fromkeys(("mean", "median", "p99"), value)


def _repository(folder: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    who = ("-c", "user.name=test", "-c", "user.email=test@localhost")
    for words in (["init", "-q"], ["add", "-A"], [*who, "commit", "-qm", "data"]):
        subprocess.run(["git", "-C", str(folder), *words], check=True)
    return folder / ".git"


def test_a_stage_is_saturated_when_requests_wait_for_a_tenth_of_their_time() -> None:
    stages = [stage for run in read_runs() for stage in run]
    saturated = [stage for stage in stages if stage.is_saturated]
    assert {stage.workload for stage in saturated} == {"reasoning"}
    assert all(stage.num_failed > 0 for stage in saturated)
    assert all(not s.num_failed > 0 for s in stages if not s.is_saturated)
    assert all(a.stage < b.stage for run in read_runs() for a, b in pairwise(run))


def test_a_stage_tells_its_time_per_token() -> None:
    stage: Stage = run_named("qwen2-5-7b-instruct-tp1-roleplay")[0]
    assert stage.tpot_mean_s == pytest.approx(0.00698, rel=0.01)
