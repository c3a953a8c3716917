"""Tests of the claims of 2026: a small version of each study, and the page of the results."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from experiments.claims import report
from experiments.claims.__main__ import PPAS, STUDIES, app
from experiments.claims.report import verdict_of
from experiments.engines import results
from experiments.engines.study import Case, Finding, Scale, Study

SMALL = Scale(num_windows=2, window_requests=40)


def kind_of(case: Case) -> tuple[str, int]:
    return case.policy, case.config.limits.max_num_batched_tokens


@pytest.mark.parametrize(
    "study",
    [
        pytest.param(study, id=study.title, marks=pytest.mark.slow if study is PPAS else ())
        for study in STUDIES
    ],
)
def test_each_study_tells_its_cases_apart_and_makes_findings(study: Study, tmp_path: Path) -> None:
    """Play one case of each policy, where it has most to do, and use its result for all cases."""
    cases = list(study.cases(SMALL))
    assert len({tuple(case.at.values()) for case in cases}) == len(cases)
    row_of = {kind: study.played(case) for kind, case in {kind_of(c): c for c in cases}.items()}
    rows = [{**case.at, **row_of[kind_of(case)]} for case in cases]
    facts = {"num_windows": 2, "window_requests": 40, "seconds": 1.0}
    results.write(study.name, rows, facts, tmp_path, "claims")
    page = tmp_path / "claims.md"
    report.write([study], tmp_path, page)
    text = page.read_text("utf-8")
    findings = list(study.findings(results.read(study.name, tmp_path)))
    assert findings
    assert all(finding.text in text for finding in findings)
    assert "nan" not in text
    assert (tmp_path / "claims" / f"{study.name}.svg").stat().st_size > 1000


def test_a_claim_is_confirmed_or_refuted_by_all_findings_and_otherwise_bounded() -> None:
    yes, no = Finding("so", True), Finding("not so", False)
    assert verdict_of([yes, yes]) == "confirmed"
    assert verdict_of([no, no]) == "refuted"
    assert verdict_of([yes, no, no]) == "bounded (1 of 3 findings agree)"


def test_the_page_is_made_of_the_committed_results(tmp_path: Path) -> None:
    page = tmp_path / "claims.md"
    report.write(STUDIES, report.RESULTS, page)
    assert page.read_text("utf-8") == report.PAGE.read_text("utf-8")


def test_a_study_that_is_none_is_refused() -> None:
    told = CliRunner().invoke(app, ["run", "--only", "ppas,residue"])
    assert isinstance(told.exception, ValueError)
    assert "no study residue; there are victims, targets, residual, ppas" in str(told.exception)
