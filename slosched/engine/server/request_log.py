"""One log line for each request for text, when it has ended; never with its text."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator

from slosched.core import SLO, DeadlineRule
from slosched.engine.log_lines import log_fields
from slosched.engine.server.account import Account
from slosched.metrics import RequestRecord

log = logging.getLogger("slosched.requests")


class RequestLog:
    """Logs accounts; a request counts as good by the run's deadline rule."""

    def __init__(self, rule: DeadlineRule) -> None:
        self._rule = rule

    def __call__(self, account: Account) -> None:
        """Log a line: at level WARNING if the server failed or gave no answer, else INFO."""
        level = logging.WARNING if account.status in (None, 500) else logging.INFO
        if log.isEnabledFor(level):
            fields = {name: value for name, value in self._fields(account) if value is not None}
            log_fields(log, level, f"{account.method} {account.path}", fields)

    def _fields(self, account: Account) -> Iterator[tuple[str, object]]:
        """Yield names and values, None for what is not known; times are in milliseconds."""
        yield "status", account.status
        for name in ("code", "param"):
            yield name, account.error.get(name)
        yield "duration_ms", _ms(account.took_s)
        yield "model", account.model
        if account.prompts:
            first = account.prompts[0]
            yield "id", first.request_id
            yield "tier", first.tier
            yield "tenant", first.tenant
            yield "prompt_tokens", sum(prompt.num_prompt_tokens for prompt in account.prompts)
            yield from _promised(account.slo)
        if (record := account.record(self._rule)) is not None:
            yield from self._outcome(account, record)

    def _outcome(self, account: Account, record: RequestRecord) -> Iterator[tuple[str, object]]:
        """Yield what became of it; of several answers, the times are those of the worst."""
        yield "cached_tokens", sum(prompt.num_cached_tokens for prompt in account.prompts)
        yield "output_tokens", account.num_output_tokens
        if record.started_s is not None:
            yield "queue_ms", _ms(record.started_s - record.arrival_s)
        yield "ttft_ms", _ms(record.ttft_s)
        yield "tpot_ms", _ms(record.tpot_s if record.num_output_tokens > 1 else None)
        yield "expected_ttft_ms", _ms(account.expected_ttft_s)
        if num_preempted := record.num_preemptions + record.num_swaps:
            yield "preemptions", num_preempted
        if account.is_relegated:
            yield "relegated", True
        yield "good", account.is_good(record, self._rule)
        yield "end_reason", record.end_reason and record.end_reason.value


def _promised(slo: SLO) -> Iterator[tuple[str, object]]:
    yield "slo_ttft_ms", _ms(slo.ttft_s)
    yield "slo_tpot_ms", _ms(slo.tpot_s)
    yield "slo_e2e_ms", _ms(slo.e2e_s)


def _ms(seconds: float | None) -> float | None:
    """Return milliseconds; None for what is unknown or infinite."""
    return None if seconds is None or not math.isfinite(seconds) else round(1000 * seconds, 2)
