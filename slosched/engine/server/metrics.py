"""Counters and histograms for GET /metrics, in Prometheus' text format.

A metric that vLLM has carries vLLM's name, so that vLLM's dashboards work; others begin with
`slosched:`.  The engine's thread writes and the handlers read, so two numbers may be one step
apart.  Requests refused on arrival are counted separately, by the handlers' thread alone.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping

from slosched.core import DeadlineRule, EndReason, RequestStatus
from slosched.engine.loop import StepRecord
from slosched.engine.server.watchdog import Watchdog
from slosched.metrics import RequestRecord, is_good, met_e2e, met_tokens, met_ttft
from slosched.perfmodel import OnlineModel
from slosched.policy.portfolio.policy import portfolio_in
from slosched.scheduler import Scheduler

_LATENCY_BUCKETS_S = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120,
)  # fmt: skip
_FINISH_REASONS = (EndReason.STOP, EndReason.LENGTH)
_PROMISES = ("ttft", "tpot", "e2e")


class Histogram:
    """A histogram with fixed latency buckets, which become cumulative only when written out."""

    def __init__(self, name: str, text: str) -> None:
        self.name = name
        self.text = text
        self._counts = [0] * (len(_LATENCY_BUCKETS_S) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(_LATENCY_BUCKETS_S, value)] += 1
        self._sum += value

    def lines(self, label: str) -> Iterator[str]:
        yield f"# HELP {self.name} {self.text}"
        yield f"# TYPE {self.name} histogram"
        total = 0
        for bound, count in zip((*_LATENCY_BUCKETS_S, math.inf), self._counts, strict=True):
            total += count
            le = "+Inf" if bound == math.inf else f"{bound:g}"
            yield f'{self.name}_bucket{{{label},le="{le}"}} {total}'
        yield f"{self.name}_sum{{{label}}} {self._sum!r}"
        yield f"{self.name}_count{{{label}}} {total}"


class ServerMetrics:
    """The metrics of one engine since it started."""

    def __init__(self, scheduler: Scheduler, watchdog: Watchdog | None = None) -> None:
        self._scheduler = scheduler
        self._watchdog = watchdog
        self._ends = dict.fromkeys(EndReason, 0)
        self._num_refused = 0
        self._num_good = 0
        self._num_promised = dict.fromkeys(_PROMISES, 0)
        self._num_kept = dict.fromkeys(_PROMISES, 0)
        self._num_prompt_tokens = 0
        self._num_output_tokens = 0
        self._num_cached_tokens = 0
        self._num_preemptions = 0
        self._predicted_s = 0.0
        self._predicted_took_s = 0.0
        self.queue_time = Histogram(
            "vllm:request_queue_time_seconds", "From arrival to the first step with the request."
        )
        self._ttft = Histogram("vllm:time_to_first_token_seconds", "Time to first token.")
        self._itl = Histogram("vllm:inter_token_latency_seconds", "Gaps between output tokens.")
        self._tpot = Histogram(
            "vllm:request_time_per_output_token_seconds", "Mean gap of each finished request."
        )
        self._e2e = Histogram(
            "vllm:e2e_request_latency_seconds", "Until the last token of each finished request."
        )
        self._step = Histogram("slosched:step_seconds", "Duration of the executed steps.")

    def observe_step(self, record: StepRecord) -> None:
        batch = record.batch
        if batch.is_empty:
            return
        took_s = record.end_s - record.start_s
        self._step.observe(took_s)
        self._num_output_tokens += len(record.result.token_ids)
        self._num_preemptions += len(batch.output.preempted) + len(batch.output.swapped_out)
        if batch.predicted_s is not None:
            self._predicted_s += batch.predicted_s
            self._predicted_took_s += took_s

    def observe_end(self, record: RequestRecord) -> None:
        assert record.end_reason is not None
        self._ends[record.end_reason] += 1
        rule = self._scheduler.limits.deadline_rule
        self._num_good += is_good(record, rule)
        for name, is_kept in _promises(record, rule).items():
            self._num_promised[name] += 1
            self._num_kept[name] += is_kept
        if record.ttft_s is not None:
            self._num_prompt_tokens += record.num_prompt_tokens
            self._num_cached_tokens += record.num_cached_tokens
            self._ttft.observe(record.ttft_s)
        for gap_s in record.itl_s:
            self._itl.observe(gap_s)
        if record.end_reason in _FINISH_REASONS:
            self._tpot.observe(record.tpot_s or 0.0)
            self._e2e.observe(record.e2e_s or 0.0)

    def observe_refusal(self) -> None:
        """Count a request that was refused as too long before the engine's thread saw it."""
        self._num_refused += 1

    def num_ended(self, reason: EndReason) -> int:
        """Return the number of requests that ended for this reason, refused ones included."""
        refused = self._num_refused if reason is EndReason.TOO_LONG else 0
        return self._ends[reason] + refused

    def render(self, model_name: str) -> str:
        """Return the whole page."""
        escaped = model_name.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
        label = f'model_name="{escaped}"'
        lines = [*self._gauges(label), *self._counters(label)]
        lines += [*self._latency_model(label), *self._portfolio(label), *self._hangs(label)]
        for histogram in (
            self._ttft, self._itl, self._tpot, self._e2e, self.queue_time, self._step,
        ):  # fmt: skip
            lines += histogram.lines(label)
        return "\n".join(lines) + "\n"

    def _gauges(self, label: str) -> Iterator[str]:
        scheduler = self._scheduler
        for name, text, value in (
            ("vllm:num_requests_running", "Requests that hold a seat.", scheduler.num_running),
            ("vllm:num_requests_waiting", "Requests in the queue.", scheduler.num_waiting),
            ("slosched:num_requests_swapped", "Requests in host memory.", scheduler.num_swapped),
            ("vllm:kv_cache_usage_perc", "KV blocks in use, 1 is all.", scheduler.kv.used_fraction),
        ):
            yield from _sample(name, "gauge", text, label, value)

    def _counters(self, label: str) -> Iterator[str]:
        for name, text, value in (
            ("vllm:prompt_tokens", "Prompt tokens, cached ones too.", self._num_prompt_tokens),
            ("vllm:prefix_cache_queries", "The same, as vLLM names it.", self._num_prompt_tokens),
            ("vllm:prefix_cache_hits", "Prompt tokens found cached.", self._num_cached_tokens),
            ("vllm:generation_tokens", "Output tokens.", self._num_output_tokens),
            ("vllm:num_preemptions", "Preemptions, by swap too.", self._num_preemptions),
            ("slosched:good_requests", "Finished within their SLO.", self._num_good),
            (
                "slosched:step_predicted_seconds",
                "What the steps with a prediction were to take.",
                self._predicted_s,
            ),
            (
                "slosched:step_with_prediction_seconds",
                "What the same steps took.",
                self._predicted_took_s,
            ),
        ):
            yield from _sample(f"{name}_total", "counter", text, label, value)
        yield "# HELP vllm:request_success_total Requests that finished."
        yield "# TYPE vllm:request_success_total counter"
        for reason in _FINISH_REASONS:
            labels = f'{label},finished_reason="{reason}"'
            yield f"vllm:request_success_total{{{labels}}} {self._ends[reason]}"
        yield "# HELP slosched:requests_ended_total Requests that ended, by reason."
        yield "# TYPE slosched:requests_ended_total counter"
        for reason in EndReason:
            count = self.num_ended(reason)
            yield f'slosched:requests_ended_total{{{label},reason="{reason}"}} {count}'

        for name, text, counts in (
            ("slosched:promises", "Ended requests with such a promise.", self._num_promised),
            ("slosched:promises_kept", "Those to which it was kept.", self._num_kept),
        ):
            by_promise = {f'{label},promise="{p}"': n for p, n in counts.items()}
            yield from _samples(f"{name}_total", "counter", text, by_promise)

    def _hangs(self, label: str) -> Iterator[str]:
        if self._watchdog is None:
            return
        is_hung = self._watchdog.hang() is not None
        text = "1 while the running step takes longer than it may, as /health says."
        yield from _sample("slosched:step_is_hung", "gauge", text, label, int(is_hung))
        num_hangs = self._watchdog.num_hangs
        text = "Steps that took longer than they may."
        yield from _sample("slosched:steps_hung_total", "counter", text, label, num_hangs)

    def _latency_model(self, label: str) -> Iterator[str]:
        """Yield how biased the fitted model is, and how often steps exceeded its upper bound."""
        model = self._scheduler.latency_model
        if not isinstance(model, OnlineModel):
            return
        states = {f'{label},regime="{regime}"': state for regime, state in model.regimes.items()}
        for name, kind, text, values in (
            (
                "slosched:latency_model_bias",
                "gauge",
                "Measured over fitted step time, lately.",
                {labels: state.bias for labels, state in states.items()},
            ),
            (
                "slosched:latency_model_margin",
                "gauge",
                "The step time that 1 % exceed over the predicted one.",
                {labels: state.margin for labels, state in states.items()},
            ),
            (
                "slosched:steps_observed_total",
                "counter",
                "Steps that the latency model has learnt from.",
                {labels: state.num_steps for labels, state in states.items()},
            ),
            (
                "slosched:steps_over_upper_total",
                "counter",
                "Those that took longer than the upper bound predicted for them.",
                {labels: state.num_over for labels, state in states.items()},
            ),
        ):
            yield from _samples(name, kind, text, values)

    def _portfolio(self, label: str) -> Iterator[str]:
        """Yield which candidate of a portfolio plans, and what the replays found and cost."""
        portfolio = portfolio_in(self._scheduler.policy)
        if portfolio is None:
            return
        for name, text, value in (
            ("evaluations", "Answers of the simulator.", portfolio.num_evaluations),
            ("changes", "Times at which another candidate took over.", portfolio.num_changes),
            ("cpu_seconds", "Processor time of the replays.", portfolio.cpu_s),
        ):
            yield from _sample(f"slosched:portfolio_{name}_total", "counter", text, label, value)
        plans = {
            f'{label},policy="{spec}"': int(spec == portfolio.current)
            for spec in portfolio.candidates
        }
        yield from _samples("slosched:portfolio_plans", "gauge", "1 if it plans now.", plans)
        latest = next(reversed(portfolio.evaluations), None)
        if latest is not None and latest.scores:
            shares = {f'{label},policy="{s}"': score.share for s, score in latest.scores.items()}
            text = "Share of good requests in the latest replays."
            yield from _samples("slosched:portfolio_share", "gauge", text, shares)


def _promises(record: RequestRecord, rule: DeadlineRule) -> dict[str, bool]:
    """Return the parts of an ended request's SLO (ttft, tpot, e2e), and whether each was met.

    The rule is the same as for attainment: a request that did not finish can only have met its
    TTFT.
    """
    slo, is_finished = record.slo, record.status is RequestStatus.FINISHED
    kept = {}
    if slo.ttft_s < math.inf:
        kept["ttft"] = met_ttft(record)
    if slo.tpot_s < math.inf:
        kept["tpot"] = is_finished and met_tokens(record, rule)
    if slo.e2e_s is not None:
        kept["e2e"] = is_finished and met_e2e(record)
    return kept


def _sample(name: str, kind: str, text: str, label: str, value: float) -> Iterator[str]:
    return _samples(name, kind, text, {label: value})


def _samples(name: str, kind: str, text: str, values: Mapping[str, float]) -> Iterator[str]:
    """Yield the lines of one metric, with a value for each set of labels."""
    yield f"# HELP {name} {text}"
    yield f"# TYPE {name} {kind}"
    for labels, value in values.items():
        yield f"{name}{{{labels}}} {value!r}"
