"""A log line every few seconds on prefill and decode, with the numbers of vLLM's and SGLang's."""

from __future__ import annotations

import logging
import math
import threading

from slosched.engine.server.metrics import TokenTotals
from slosched.engine.server.worker import EngineWorker

log = logging.getLogger(__name__)


class ThroughputLog:
    """Tells what a server did since the last line; nothing while it has nothing to do."""

    def __init__(self, worker: EngineWorker) -> None:
        self._worker = worker
        self._told = TokenTotals(0, 0, 0)
        self._told_s = worker.now_s()

    def start(self, interval_s: float) -> None:
        """Write lines from a thread until the worker stops; infinity writes none."""
        if interval_s < math.inf:
            threading.Thread(
                target=self._run, args=(interval_s,), name="slosched-throughput", daemon=True
            ).start()

    def line(self) -> str | None:
        """Return the line on the time since the last call; None if nothing happened in it."""
        scheduler, now_s = self._worker.scheduler, self._worker.now_s()
        totals, before = self._worker.metrics.num_tokens, self._told
        took_s, self._told, self._told_s = now_s - self._told_s, totals, now_s
        if (totals == before and not scheduler.num_unfinished) or took_s <= 0:
            return None
        prompt, cached = totals.prompt - before.prompt, totals.cached - before.cached
        hits = f", prefix cache hits: {cached / prompt:.1%}" if cached else ""
        return (
            f"prefill: {prompt / took_s:.1f} tokens/s, "
            f"decode: {(totals.output - before.output) / took_s:.1f} tokens/s, "
            f"running: {scheduler.num_running}, waiting: {scheduler.num_waiting}, "
            f"swapped: {scheduler.num_swapped}, "
            f"KV cache usage: {scheduler.kv.used_fraction:.1%}{hits}"
        )

    def _run(self, interval_s: float) -> None:
        while not self._worker.wait_stopped(interval_s):
            if (line := self.line()) is not None:
                log.info("%s", line)
