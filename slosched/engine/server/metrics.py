"""Counters and histograms for GET /metrics, in Prometheus' text format.

A metric that vLLM has carries vLLM's name, so that vLLM's dashboards work; others begin with
`slosched:`.  The engine's thread writes and the handlers read, so two numbers may be one step
apart.  Requests refused on arrival are counted separately, by the handlers' thread alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from slosched.core import DeadlineRule, EndReason, Request, RequestStatus
from slosched.engine.loop import StepRecord
from slosched.engine.server.finished_metrics import FinishedMetrics
from slosched.engine.server.model_metrics import latency_model_lines, portfolio_lines
from slosched.engine.server.process_metrics import process_lines
from slosched.engine.server.prometheus import TOKENS, Histogram, labels_of, sample, samples
from slosched.engine.server.promise_metrics import PromiseMetrics
from slosched.engine.server.service_metrics import ServiceMetrics
from slosched.engine.server.watchdog import Watchdog
from slosched.metrics import RequestRecord, is_good, met_e2e, met_tokens, met_ttft
from slosched.scheduler import Scheduler

_FINISHED = (EndReason.STOP, EndReason.LENGTH)
_VLLM_REASONS = {
    "stop": (EndReason.STOP,),
    "length": (EndReason.LENGTH,),
    "abort": (EndReason.CLIENT, EndReason.SHUTDOWN, EndReason.SIBLING, EndReason.TIMEOUT),
    "error": (EndReason.FAULT, EndReason.NO_TOKEN),
}
"""The reasons for which requests end in vLLM's metrics."""
_STEP_TOKENS = (1, 8, *(2**power for power in range(4, 15)))
_SHORT_S = (5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 1)
_PROMISES = ("ttft", "tpot", "e2e")


class TokenTotals(NamedTuple):
    """Tokens since the server started."""

    prompt: int
    cached: int
    """Prompt tokens that were found in the prefix cache."""
    output: int


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
        self._num_corrupted = 0
        self.by_tier = ServiceMetrics("tier")
        self.by_tenant = ServiceMetrics("tenant")
        self._num_drafts = 0
        self._num_draft_tokens = 0
        self._num_accepted_tokens = 0
        speculation = scheduler.speculation
        most_drafts = 0 if speculation is None else speculation.max_draft_tokens
        self._num_accepted_at = [0] * most_drafts
        """How many drafts were accepted at least up to each place."""
        self._predicted_s = 0.0
        self._predicted_took_s = 0.0
        self._finished = FinishedMetrics()
        self.by_promise = PromiseMetrics(scheduler.policy)
        self._queue_time = Histogram(
            "vllm:request_queue_time_seconds", "From arrival to the first step with the request."
        )
        self._ttft = Histogram("vllm:time_to_first_token_seconds", "Time to first token.")
        self._itl = Histogram("vllm:inter_token_latency_seconds", "Gaps between output tokens.")
        self._computed_tokens = Histogram(
            "vllm:request_prefill_kv_computed_tokens",
            "Prompt tokens of each request that were not found cached.",
            TOKENS,
        )
        self._step_tokens = Histogram(
            "vllm:iteration_tokens_total", "Tokens computed in each step.", _STEP_TOKENS
        )
        self._step = Histogram("slosched:step_seconds", "Duration of the executed steps.")
        self._schedule = Histogram(
            "slosched:schedule_seconds", "Time in which the scheduler planned a step.", _SHORT_S
        )
        self._histograms = [value for value in vars(self).values() if isinstance(value, Histogram)]

    def observe_step(self, record: StepRecord) -> None:
        """Count what happened in a step, also for requests that are still to end."""
        batch = record.batch
        self._schedule.observe(record.schedule_s)
        if batch.is_empty:
            return
        took_s = record.end_s - record.start_s
        self._step.observe(took_s)
        self._step_tokens.observe(sum(chunk.num_new_tokens for chunk in batch.chunks))
        num_accepted = record.result.num_accepted
        for chunk in batch.chunks:
            request_id = chunk.request.request_id
            if request_id in record.result.token_ids:
                self._observe_tokens(chunk.request, 1 + num_accepted.get(request_id, 0))
        if batch.drafts:
            self._num_drafts += len(batch.drafts)
            self._num_draft_tokens += sum(map(len, batch.drafts.values()))
            for num_tokens in num_accepted.values():
                self._num_accepted_tokens += num_tokens
                for place in range(num_tokens):
                    self._num_accepted_at[place] += 1
        self._num_corrupted += len(record.result.failed)
        self._num_preemptions += len(batch.output.preempted) + len(batch.output.swapped_out)
        if batch.predicted_s is not None:
            self._predicted_s += batch.predicted_s
            self._predicted_took_s += took_s

    def observe_scheduled(self, request: Request, start_s: float) -> float | None:
        """Count a request whose first step began at `start_s`, before `observe_step` counts it.

        Returns the TTFT that was expected when it arrived; None if none was.
        """
        self._queue_time.observe(start_s - request.arrival_s)
        return self.by_promise.observe_scheduled(request, start_s)

    def _observe_tokens(self, request: Request, num_tokens: int) -> None:
        """Count the latest tokens of a request, one or more, which came in one step."""
        times_s = request.token_times_s
        self._num_output_tokens += num_tokens
        if len(times_s) > num_tokens:
            for i in range(-num_tokens, 0):
                self._itl.observe(times_s[i] - times_s[i - 1])
            return
        self._ttft.observe(times_s[0] - request.arrival_s)
        self.by_promise.observe_first_token(request)
        self._num_prompt_tokens += request.num_prompt_tokens
        self._num_cached_tokens += request.num_cached_tokens
        self._computed_tokens.observe(request.num_prompt_tokens - request.num_cached_tokens)

    def observe_end(
        self, record: RequestRecord, request: Request, output_tokens: Sequence[int]
    ) -> None:
        """Count a request that has ended, whose answers have so many `output_tokens` each.

        Of several answers, `record` is that of the worst.
        """
        assert record.end_reason is not None
        self._ends[record.end_reason] += 1
        rule = self._scheduler.limits.deadline_rule
        self._num_good += is_good(record, rule)
        self.by_tier.observe_end(request.tier, record, request, rule)
        self.by_tenant.observe_end(request.tenant, record, request, rule)
        for name, is_kept in _promises(record, rule).items():
            self._num_promised[name] += 1
            self._num_kept[name] += is_kept
        if record.end_reason in _FINISHED:
            self._finished.observe(record, request.max_tokens, output_tokens)

    @property
    def num_tokens(self) -> TokenTotals:
        """Return the tokens of all requests so far; prompts count with their first output token."""
        return TokenTotals(
            self._num_prompt_tokens, self._num_cached_tokens, self._num_output_tokens
        )

    def observe_refusal(self) -> None:
        """Count a request that was refused as too long before the engine's thread saw it."""
        self._num_refused += 1

    def num_ended(self, reason: EndReason) -> int:
        """Return the number of requests that ended for this reason, refused ones included."""
        refused = self._num_refused if reason is EndReason.TOO_LONG else 0
        return self._ends[reason] + refused

    def render(self, model_name: str) -> str:
        """Return the whole page."""
        label = labels_of(model_name=model_name)
        lines = [*self._gauges(label), *self._counters(label), *self._ended(label)]
        lines += self._prompt_tokens_by_source(label)
        lines += [*self.by_tier.lines(label), *self.by_tenant.lines(label)]
        lines += [*self._drafted(label), *self._hangs(label)]
        lines += process_lines()
        lines += latency_model_lines(self._scheduler.latency_model, label)
        lines += portfolio_lines(self._scheduler.policy, label)
        for histogram in self._histograms:
            lines += histogram.lines(label)
        lines += [*self._finished.lines(label), *self.by_promise.lines(label)]
        return "\n".join(lines) + "\n"

    def _gauges(self, label: str) -> Iterator[str]:
        scheduler = self._scheduler
        for name, text, value in (
            ("vllm:num_requests_running", "Requests that hold a seat.", scheduler.num_running),
            ("vllm:num_requests_waiting", "Requests in the queue.", scheduler.num_waiting),
            ("slosched:num_requests_swapped", "Requests in host memory.", scheduler.num_swapped),
            ("vllm:kv_cache_usage_perc", "KV blocks in use, 1 is all.", scheduler.kv.used_fraction),
        ):
            yield from sample(name, "gauge", text, label, value)
        by_reason = {
            f'{label},reason="capacity"': scheduler.num_waiting,
            f'{label},reason="deferred"': 0,
        }
        text = "Requests in the queue; the scheduler sets none aside."
        yield from samples("vllm:num_requests_waiting_by_reason", "gauge", text, by_reason)
        settings = labels_of(
            block_size=str(scheduler.kv.block_size),
            num_gpu_blocks=str(scheduler.kv.num_blocks),
            enable_prefix_caching=str(scheduler.kv.caches_prefixes),
        )
        text = "Settings of the KV cache."
        yield from sample("vllm:cache_config_info", "gauge", text, f"{label},{settings}", 1)
        rule = labels_of(rule=scheduler.limits.deadline_rule.value)
        text = "When the tokens after the first are due (--deadline-rule)."
        yield from sample("slosched:deadline_rule_info", "gauge", text, f"{label},{rule}", 1)

    def _counters(self, label: str) -> Iterator[str]:
        for name, text, value in (
            ("vllm:prompt_tokens", "Prompt tokens, cached ones too.", self._num_prompt_tokens),
            ("vllm:prefix_cache_queries", "The same, as vLLM names it.", self._num_prompt_tokens),
            ("vllm:prefix_cache_hits", "Prompt tokens found cached.", self._num_cached_tokens),
            ("vllm:prompt_tokens_cached", "The same once more.", self._num_cached_tokens),
            ("vllm:generation_tokens", "Output tokens.", self._num_output_tokens),
            ("vllm:num_preemptions", "Preemptions, by swap too.", self._num_preemptions),
            (
                "vllm:corrupted_requests",
                "Requests that ended because their logits were not numbers.",
                self._num_corrupted,
            ),
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
            yield from sample(f"{name}_total", "counter", text, label, value)

    def _prompt_tokens_by_source(self, label: str) -> Iterator[str]:
        num_cached = self._num_cached_tokens
        by_source = {
            f'{label},source="local_compute"': self._num_prompt_tokens - num_cached,
            f'{label},source="local_cache_hit"': num_cached,
        }
        text = "Prompt tokens that were computed, and those found cached."
        yield from samples("vllm:prompt_tokens_by_source_total", "counter", text, by_source)

    def _drafted(self, label: str) -> Iterator[str]:
        if self._scheduler.speculation is None:
            return
        for name, text, value in (
            ("drafts", "Decodes of steps that verified drafts.", self._num_drafts),
            ("draft_tokens", "Draft tokens that were verified.", self._num_draft_tokens),
            ("accepted_tokens", "Draft tokens that were accepted.", self._num_accepted_tokens),
        ):
            name = f"vllm:spec_decode_num_{name}_total"
            yield from sample(name, "counter", text, label, value)
        at_place = {
            f'{label},position="{place}"': number
            for place, number in enumerate(self._num_accepted_at)
        }
        name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
        text = "Draft tokens that were accepted, by their place in the draft."
        yield from samples(name, "counter", text, at_place)

    def _ended(self, label: str) -> Iterator[str]:
        ended = {
            f'{label},finished_reason="{name}"': sum(map(self.num_ended, reasons))
            for name, reasons in _VLLM_REASONS.items()
        }
        text = "Requests that ended after they were let in."
        yield from samples("vllm:request_success_total", "counter", text, ended)
        by_reason = {f'{label},reason="{reason}"': self.num_ended(reason) for reason in EndReason}
        text = "Requests that ended, by reason."
        yield from samples("slosched:requests_ended_total", "counter", text, by_reason)
        rejected = {
            f'{label},reason="{reason}"': self.num_ended(reason)
            for reason in EndReason
            if reason.status is RequestStatus.REJECTED
        }
        text = "Requests that were rejected, by reason."
        yield from samples("vllm:admission_rejections_total", "counter", text, rejected)
        for name, text, counts in (
            ("slosched:promises", "Ended requests with such a promise.", self._num_promised),
            ("slosched:promises_kept", "Those to which it was kept.", self._num_kept),
        ):
            by_promise = {f'{label},promise="{p}"': n for p, n in counts.items()}
            yield from samples(f"{name}_total", "counter", text, by_promise)

    def _hangs(self, label: str) -> Iterator[str]:
        if self._watchdog is None:
            return
        is_hung = self._watchdog.hang() is not None
        text = "1 while the running step takes longer than it may, as /health says."
        yield from sample("slosched:step_is_hung", "gauge", text, label, int(is_hung))
        num_hangs = self._watchdog.num_hangs
        text = "Steps that took longer than they may."
        yield from sample("slosched:steps_hung_total", "counter", text, label, num_hangs)


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
