"""Collects measured stages from three public repositories of the authors of inference-sim.

Numbers are taken over, and nothing else: settings of the servers, the load, and aggregates of the
latencies that the client inference-perf measured.
"""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Iterator, Mapping
from io import StringIO
from pathlib import Path
from typing import Any

import pandas as pd

from experiments.fidelity.stages import Stage

TRAINING_COMMIT = "ed5c1d26900e6909758d5e1641a18edaf56a1caf"
_RUNS = "default_args"
_ERRORS = "results_trainval/error_records.csv"
_LOADS = "testdata/trained_physics_iter29.json"
_METRICS = {"e2e_mean": "e2e_mean_s", "ttft_mean": "ttft_mean_s", "ttft_p99": "ttft_p99_s"}


def collect(training: Path, validation: Path, simulator: Path) -> list[Stage]:
    """Return all stages of the three git directories, those of `training` first."""
    loads = {e["id"]: e for e in json.loads(_show(simulator, _LOADS))["experiments"]}
    first = list(_runs_with_results(training, loads))
    known = {"-".join(stage.run.split("-")[:2]) for stage in first}
    rest = [e for name, e in loads.items() if name not in known]
    errors = pd.read_csv(StringIO(_show(validation, _ERRORS)), low_memory=False)
    lengths = {(s.model, s.workload): (s.prompt_min_tokens, s.prompt_max_tokens) for s in first}
    return first + [s for e in rest for s in _runs_with_aggregates(e, errors, lengths)]


def _runs_with_results(git: Path, loads: dict[str, Any]) -> Iterator[Stage]:
    """Yield the stages whose whole summaries were published."""
    for run in _git(git, "ls-tree", "-d", "--name-only", f"HEAD:{_RUNS}").split():
        folder = f"{_RUNS}/{run}"
        server = _settings(_show(git, f"{folder}/exp-config.yaml"))
        load = json.loads(_show(git, f"{folder}/profile.yaml"))
        prompt = load["data"]["shared_prefix"]
        same_server = loads.get("-".join(run.split("-")[:2]), {})
        for index, stage in enumerate(load["load"]["stages"]):
            name = f"{folder}/results/stage_{index}_lifecycle_metrics.json"
            result = json.loads(_show(git, name))
            seen = result["successes"]
            first_s, whole_s = (
                seen["latency"][m] for m in ("time_to_first_token", "request_latency")
            )
            yield Stage(
                run=run,
                model=server["model"],
                tensor_parallel=int(server["tensor_parallelism"]),
                workload=run.rpartition("-")[2],
                max_num_batched_tokens=int(server["max_num_batched_tokens"]),
                max_num_seqs=int(server["max_num_seqs"]),
                kv_blocks=same_server.get("total_kv_blocks", math.nan),
                stage=index,
                rate_per_s=stage["rate"],
                duration_s=stage["duration"],
                system_prompt_tokens=prompt["system_prompt_len"],
                prompt_min_tokens=int(seen["prompt_len"]["min"]),
                prompt_max_tokens=int(seen["prompt_len"]["max"]),
                output_tokens=prompt["output_len"],
                num_succeeded=seen["count"],
                num_failed=result["failures"]["count"],
                e2e_mean_s=whole_s["mean"],
                ttft_mean_s=first_s["mean"],
                ttft_p50_s=first_s["median"],
                ttft_p99_s=first_s["p99"],
            )


def _runs_with_aggregates(
    experiment: dict[str, Any],
    errors: pd.DataFrame,
    lengths: Mapping[tuple[str, str], tuple[int, int]],
) -> Iterator[Stage]:
    """Yield the stages of which means and two quantiles were published.

    `lengths` has the least and greatest length of the prompts that other runs had, by model and
    workload.  Prompts of other models are as long as was asked for.
    """
    name = experiment["id"]
    of_run = errors[errors["exp_id"].astype(str) == name]
    folder = str(of_run["experiment_folder"].iloc[0]).rpartition("/")[2]
    load = experiment["workload"]["inference_perf"]
    prompt = load["shared_prefix"]
    workload = str(of_run["workload"].iloc[0])
    asked = prompt["system_prompt_len"] + prompt["question_len"]
    shortest, longest = lengths.get((experiment["model"], workload), (asked, asked))
    for index, stage in enumerate(load["stages"]):
        of_stage = of_run[of_run["stage_index"] == index].drop_duplicates("metric_name")
        actual_ms = of_stage.set_index("metric_name")["actual"]
        yield Stage(
            run=folder,
            model=experiment["model"],
            tensor_parallel=experiment["tp"],
            workload=workload,
            max_num_batched_tokens=experiment["max_num_batched_tokens"],
            max_num_seqs=experiment["max_num_seqs"],
            kv_blocks=experiment["total_kv_blocks"],
            stage=index,
            rate_per_s=stage["rate"],
            duration_s=stage["duration"],
            system_prompt_tokens=prompt["system_prompt_len"],
            prompt_min_tokens=shortest,
            prompt_max_tokens=longest,
            output_tokens=prompt["output_len"],
            num_succeeded=math.nan,
            num_failed=math.nan,
            ttft_p50_s=math.nan,
            **{column: actual_ms[metric] / 1e3 for metric, column in _METRICS.items()},
        )


def _settings(text: str) -> dict[str, str]:
    """Return what lines such as "max_num_seqs: 128" say."""
    pairs = (line.partition(":") for line in text.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def _show(git: Path, path: str) -> str:
    return _git(git, "show", f"HEAD:{path}")


def _git(git: Path, *words: str) -> str:
    command = ["git", f"--git-dir={git}", *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
