"""Histograms for GET /metrics of requests that have finished."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from slosched.engine.server.prometheus import TOKENS, Histogram
from slosched.metrics import RequestRecord


class FinishedMetrics:
    """Times and tokens of finished requests, under vLLM's names."""

    def __init__(self) -> None:
        self._tpot = Histogram(
            "vllm:request_time_per_output_token_seconds", "Mean gap of each finished request."
        )
        self._e2e = Histogram(
            "vllm:e2e_request_latency_seconds", "Until the last token of each finished request."
        )
        self._prefill = Histogram(
            "vllm:request_prefill_time_seconds", "From the first step to the first token."
        )
        self._decode = Histogram(
            "vllm:request_decode_time_seconds", "From the first token to the last."
        )
        self._inference = Histogram(
            "vllm:request_inference_time_seconds", "From the first step to the last token."
        )
        self._prompt_tokens = Histogram(
            "vllm:request_prompt_tokens", "Prompt tokens of each finished request.", TOKENS
        )
        self._generation_tokens = Histogram(
            "vllm:request_generation_tokens",
            "Output tokens of each finished request, those of all answers.",
            TOKENS,
        )
        self._most_generation_tokens = Histogram(
            "vllm:request_max_num_generation_tokens",
            "Output tokens of the longest answer to each finished request.",
            TOKENS,
        )
        self._max_tokens = Histogram(
            "vllm:request_params_max_tokens", "Output limit of each finished request.", TOKENS
        )
        self._num_answers = Histogram(
            "vllm:request_params_n",
            "Answers to each finished request (n, or best_of if it is larger).",
            (1, 2, 5, 10, 20),
        )
        self._preemptions = Histogram(
            "vllm:request_num_preemptions",
            "Preemptions of each finished request, by swap too.",
            (0, 1, 2, 5, 10, 20, 50),
        )

    def observe(self, record: RequestRecord, max_tokens: int, output_tokens: Sequence[int]) -> None:
        """Count a finished request, whose answers have so many `output_tokens` each.

        Of several answers, `record` is that of the worst.
        """
        self._tpot.observe(record.tpot_s or 0.0)
        self._e2e.observe(record.e2e_s or 0.0)
        self._prompt_tokens.observe(record.num_prompt_tokens)
        self._generation_tokens.observe(sum(output_tokens))
        self._most_generation_tokens.observe(max(output_tokens))
        self._max_tokens.observe(max_tokens)
        self._num_answers.observe(len(output_tokens))
        self._preemptions.observe(record.num_preemptions + record.num_swaps)
        first_s, last_s = record.token_times_s[0], record.token_times_s[-1]
        self._decode.observe(last_s - first_s)
        if record.started_s is not None:
            self._prefill.observe(first_s - record.started_s)
            self._inference.observe(last_s - record.started_s)

    def lines(self, label: str) -> Iterator[str]:
        for histogram in vars(self).values():
            yield from histogram.lines(label)
