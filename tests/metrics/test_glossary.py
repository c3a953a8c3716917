"""The glossary defines every metric that a report shows."""

from __future__ import annotations

import re
from pathlib import Path

from replays import make_record, rejected

from slosched.core import DeadlineRule, EndReason
from slosched.metrics import StepRow, summarize, summarize_steps

GLOSSARY = Path(__file__).parents[2] / "docs" / "glossary.md"


def test_every_metric_is_defined() -> None:
    replay = [make_record(0.5, 0.6), rejected(1.0, EndReason.EXPIRED)]
    step = StepRow(0.0, 1.0, 1.0, 10, 1, 0, 1, 0, 0.5, 0)
    names = {**summarize(replay, DeadlineRule.TBT).as_row(), **summarize_steps([step]).as_row()}
    table = GLOSSARY.read_text("utf-8").partition("## Metrics")[2].partition("## Scheduling")[0]
    defined = set(re.findall(r"`(\w+)`", table)) | {"deadline_rule"}  # defined among the promises
    families = {
        name
        for name in names
        if re.match(r"(ttft|tpot|itl|e2e)_p\d+_s|rejected_|on_time_tokens_", name)
    }
    assert set(names) - defined - families == set()
    for family in ("ttft_p50_s", "e2e_p99_s", "rejected_expired", "on_time_tokens_envelope"):
        assert family in defined
        assert family in names
