"""Metrics of a replay: pure functions over the records of its requests and steps.

The same functions score the simulator, our server and any other: they see records, not engines.
docs/glossary.md defines every figure, with its source.  The modules:

* `records`: what is known of a request and of a step;
* `columns`: records as arrays;
* `groups`: the record that stands for several answers to one prompt;
* `promises`: deadlines of tokens, and which SLOs were kept;
* `fluidity`, `fairness`, `slack`, `steps`: groups of metrics;
* `summary`: all of them, with one row for each replay.
"""

from slosched.metrics.columns import RequestColumns
from slosched.metrics.fairness import (
    DecileRow,
    Share,
    TierRow,
    attainment_by_decile,
    attainment_by_tier,
    jain_index,
)
from slosched.metrics.fluidity import FLUID_INDEX, fluid_token_rate, fluidity_indices
from slosched.metrics.groups import records_of, worst
from slosched.metrics.promises import (
    good_requests,
    is_good,
    late_gaps,
    met_e2e,
    met_tokens,
    met_ttft,
    token_due_s,
    tokens_on_time,
)
from slosched.metrics.records import RequestRecord, StepRow
from slosched.metrics.slack import least_slack_s
from slosched.metrics.steps import StepSummary, summarize_steps
from slosched.metrics.summary import (
    PERCENTILES,
    Percentiles,
    Summary,
    offered_window_s,
    percentiles,
    summarize,
)

__all__ = [
    "FLUID_INDEX",
    "PERCENTILES",
    "DecileRow",
    "Percentiles",
    "RequestColumns",
    "RequestRecord",
    "Share",
    "StepRow",
    "StepSummary",
    "Summary",
    "TierRow",
    "attainment_by_decile",
    "attainment_by_tier",
    "fluid_token_rate",
    "fluidity_indices",
    "good_requests",
    "is_good",
    "jain_index",
    "late_gaps",
    "least_slack_s",
    "met_e2e",
    "met_tokens",
    "met_ttft",
    "offered_window_s",
    "percentiles",
    "records_of",
    "summarize",
    "summarize_steps",
    "token_due_s",
    "tokens_on_time",
    "worst",
]
