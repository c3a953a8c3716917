"""Tests of the study of today's engines: its ratios, and a small version of each study."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import typer
from typer.testing import CliRunner

from experiments.arena.scenarios import TRACES
from experiments.engines import report, results
from experiments.engines.__main__ import PREFIXES, STUDIES, app
from experiments.engines.prefixes import reuse
from experiments.engines.study import Scale, Study, gap_column, over_windows, ratio
from experiments.robustness.__main__ import app as robustness_app
from slosched.workload import Trace
from slosched.workload.request import TraceRequest

SMALL = Scale(num_windows=2, window_requests=12)
EVERY = [
    pytest.param(study, id=study.name, marks=pytest.mark.slow if study is PREFIXES else ())
    for study in STUDIES
]

needs_traces = pytest.mark.skipif(
    not (TRACES / "mooncake_conversation.jsonl").exists(), reason=f"no public traces in {TRACES}"
)


def frame_of(values: dict[str, list[float]]) -> pd.DataFrame:
    return pd.DataFrame(
        {"mode": mode, "window": window, "x": value}
        for mode, of_mode in values.items()
        for window, value in enumerate(of_mode)
    )


def test_a_ratio_is_the_geometric_mean_over_windows_with_students_interval() -> None:
    found = ratio(frame_of({"a": [2.0, 8.0], "b": [1.0, 1.0]}), "x", {"mode": "a"}, {"mode": "b"})
    assert found.mean == pytest.approx(4.0)
    # The standard error of ln 2 and ln 8 is ln 2; Student's t at 0.975 with one degree is 12.7.
    reach = 12.7062 * math.log(2)
    assert (found.low, found.high) == pytest.approx(
        (4 * math.exp(-reach), 4 * math.exp(reach)), rel=1e-4
    )
    assert not found.is_above_one


def test_a_ratio_is_above_one_if_its_interval_is_and_one_if_it_is_narrow_around_it() -> None:
    frame = frame_of({"a": [2.0, 2.1, 1.9], "b": [1.0, 1.0, 1.0]})
    assert ratio(frame, "x", {"mode": "a"}, {"mode": "b"}).is_above_one
    assert not ratio(frame, "x", {"mode": "b"}, {"mode": "a"}).is_above_one
    assert ratio(frame, "x", {"mode": "b"}, {"mode": "b"}).is_one
    with pytest.raises(ValueError, match="replays"):
        ratio(frame, "x", {"mode": "a"}, {"mode": "c"})


def test_medians_and_ranges_are_over_windows() -> None:
    found = over_windows(frame_of({"a": [2.0, 9.0, 4.0]}), ["mode"], "x").iloc[0]
    assert (found["median"], found["min"], found["max"]) == (4.0, 2.0, 9.0)


@needs_traces
def test_a_replay_becomes_what_happened_in_it() -> None:
    case = next(iter(STUDIES[0].cases(SMALL)))
    row = STUDIES[0].played(case)
    assert row["num_served"] == len(case.trace) == SMALL.window_requests
    assert 0 < row[gap_column(0.5)] <= row[gap_column(0.99)] <= row[gap_column(1.0)]
    assert 0 < row["ttft_p50_s"] <= row["ttft_p99_s"]
    tokens = sum(r.num_output_tokens for r in case.trace.requests)
    assert row["tokens_per_s"] * case.trace.duration_s < tokens


@needs_traces
@pytest.mark.parametrize("study", EVERY)
def test_each_study_tells_its_cases_apart_and_makes_findings_and_a_figure(
    study: Study, tmp_path: Path
) -> None:
    """Play some of the cases once, and use each result for all windows."""
    cases = list(study.cases(SMALL))
    columns = list(cases[0].at)
    assert len({tuple(case.at.values()) for case in cases}) == len(cases)
    by_policy = {
        (case.policy, case.config.prefix_cache, case.config.overlap): case for case in cases
    }
    row_of = {key: study.played(case) for key, case in by_policy.items()}
    rows = [{**c.at, **row_of[c.policy, c.config.prefix_cache, c.config.overlap]} for c in cases]
    assert list(rows[0])[: len(columns)] == columns
    results.write(
        study.name,
        rows,
        {"num_windows": 2, "window_requests": 12, "seconds": 1.0},
        tmp_path,
        "engines",
    )
    page = tmp_path / "engines.md"
    report.write([study], tmp_path, page)
    text = page.read_text("utf-8")
    findings = list(study.findings(results.read(study.name, tmp_path)))
    assert findings
    assert all(finding.text in text for finding in findings)
    assert (tmp_path / "engines" / f"{study.name}.svg").stat().st_size > 1000


def test_what_a_cache_without_end_would_find_and_how_long_it_lay_there() -> None:
    """Find 4 of 9 blocks: 1 after 2 s, and 3 after 10 s."""
    prompts = [(0.0, (1, 2, 3)), (2.0, (1, 5)), (3.0, (7,)), (10.0, (1, 2, 3))]
    trace = Trace.of(
        [
            TraceRequest(f"r{i}", at_s, 16 * len(hashes), 5, prefix_hashes=hashes)
            for i, (at_s, hashes) in enumerate(prompts)
        ],
        "t",
        prefix_block_tokens=16,
    )
    assert reuse(trace) == {"findable": pytest.approx(4 / 9), "since_s": 10.0}


@pytest.mark.parametrize(("of", "name"), [(app, "engines"), (robustness_app, "robustness")])
def test_the_page_is_made_by_a_command_of_its_own(of: typer.Typer, name: str) -> None:
    told = CliRunner().invoke(of, ["report", "--help"], env={"COLUMNS": "200"})
    assert told.exit_code == 0
    assert f"Make docs/{name}.md and its figures" in told.output
    assert f"python -m experiments.{name} report" in told.output


def test_the_verdict_counts_the_settings_that_agree(tmp_path: Path) -> None:
    study = STUDIES[0]
    rows = [
        {
            "trace": t,
            "rate": r,
            "mode": m,
            "window": w,
            "num_requests": 12,
            "ttft_mean_s": 0.1,
            **gaps,
        }
        for t, r in (("x", 1.0), ("y", 2.0))
        for m, gaps in _gaps_of(slow=t == "x").items()
        for w in range(2)
    ]
    results.write(
        "stalls",
        rows,
        {"num_windows": 2, "window_requests": 12, "seconds": 1.0},
        tmp_path,
        "engines",
    )
    page = tmp_path / "engines.md"
    report.write([replace(study, title="A title")], tmp_path, page)
    text = page.read_text("utf-8")
    assert "| [A title](#a-title) | in 1 of 2 settings |" in text
    assert text.count("**Not so:**") == 1


def _gaps_of(*, slow: bool) -> dict[str, dict[str, float]]:
    names = [gap_column(share) for share in (0.5, 0.9, 0.99, 0.999, 0.9999, 1.0)]
    return {
        "whole prompts first": dict.fromkeys(names, 0.3 if slow else 0.1),
        "chunked prefill": dict.fromkeys(names, 0.1),
    }
