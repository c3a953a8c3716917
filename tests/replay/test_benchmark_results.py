"""Tests that results of vLLM's and SGLang's benchmarks are scored as those of the simulator are."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from slosched.core import SLO, DeadlineRule, EndReason, RequestStatus
from slosched.metrics import summarize
from slosched.replay.benchmark_results import is_benchmark_result, read_benchmark_result
from slosched.replay.files import RecordsError, write_records

PROMISE = SLO(1.0, 0.1)
VLLM = {
    "date": "20260101-000000",
    "backend": "vllm",
    "model_id": "meta-llama/Llama-3.1-8B-Instruct",
    "request_rate": 2.0,
    "duration": 3.5,
    "completed": 2,
    "input_lens": [10, 20, 30],
    "output_lens": [3, 2, 0],
    "ttfts": [0.5, 2.0, 0.0],
    "itls": [[0.05, 0.07], [0.1], []],
    "start_times": [100.5, 100.0, 101.0],
    "generated_texts": ["a", "b", ""],
    "errors": ["", "", "Connection reset"],
}
"""A shortened result of `vllm bench serve --save-result --save-detailed`."""
SGLANG = {name: VLLM[name] for name in VLLM if name != "start_times"}


def written(tmp_path: Path, *results: object) -> Path:
    path = tmp_path / "result.json"
    path.write_text("\n".join(json.dumps(result) for result in results))
    return path


def test_a_result_of_vllm_becomes_records(tmp_path):
    path = written(tmp_path, VLLM)
    assert is_benchmark_result(path)
    replay = read_benchmark_result(path, PROMISE)
    first, second, failed = replay.records
    assert (first.arrival_s, first.num_prompt_tokens) == (0.5, 10)
    assert list(first.token_times_s) == pytest.approx([1.0, 1.05, 1.12])
    assert (first.status, first.slo) == (RequestStatus.FINISHED, PROMISE)
    assert second.ttft_s == pytest.approx(2.0)
    assert (failed.status, failed.end_reason) == (RequestStatus.ABORTED, EndReason.FAULT)
    assert replay.provenance["model_id"] == VLLM["model_id"]
    summary = summarize(replay.records, DeadlineRule.MEAN_TPOT)
    assert (summary.num_good, summary.num_aborted) == (1, 1)
    # Three requests come half a second apart on average.
    assert summary.offered_requests_per_s == pytest.approx(2.0)


def test_a_result_of_sglang_has_no_arrivals_and_so_no_rate(tmp_path):
    older = {**SGLANG, "ttfts": [9.0, 9.0, 9.0]}
    replay = read_benchmark_result(written(tmp_path, older, SGLANG), PROMISE)
    summary = summarize(replay.records, DeadlineRule.MEAN_TPOT)
    assert summary.attainment == pytest.approx(1 / 3)
    assert summary.ttft_s.p50 == pytest.approx(1.25)
    assert math.isnan(summary.good_requests_per_s)


def test_chunks_of_several_tokens_leave_ttft_tpot_and_e2e_as_they_are(tmp_path):
    """Read five tokens in three chunks: however they are spread, the request took 0.5 + 0.4 s."""
    result = {**VLLM, "output_lens": [5, 2, 0], "itls": [[0.3, 0.1], [0.1], []]}
    (record, *_) = read_benchmark_result(written(tmp_path, result), PROMISE).records
    assert record.ttft_s == pytest.approx(0.5)
    assert record.tpot_s == pytest.approx(0.4 / 4)
    assert record.e2e_s == pytest.approx(0.9)
    assert list(record.token_times_s) == pytest.approx([1.0, 1.0, 1.3, 1.3, 1.4])


@pytest.mark.parametrize(
    ("result", "complaint"),
    [
        ({"completed": 3}, "no input_lens, output_lens, ttfts, itls.*--save-detailed"),
        ({**VLLM, "itls": [[], []]}, r"\[2, 3\] entries"),
        (
            {**VLLM, "input_lens": ["ten", 20, 30]},
            "of request 0, input_lens is 'ten', not a number of",
        ),
        ({**VLLM, "input_lens": [10, math.inf, 30]}, "of request 1, input_lens is inf"),
        ({**VLLM, "itls": [[], 7, []]}, "of request 1, itls is 7, not a list of seconds"),
        ({**VLLM, "ttfts": [-0.5, 1.0, 1.0]}, "of request 0, no token may come before"),
        ({**VLLM, "start_times": 3}, "start_times is 3, not a list"),
        ({**VLLM, "ttfts": [None, 1.0, 1.0]}, "of request 0, ttfts is None, not a number of sec"),
        ({**VLLM, "ttfts": [math.nan, 1.0, 1.0]}, "of request 0, .* finite, not nan"),
        ([1, 2], r"holds \[1, 2\], not the result"),
    ],
)
def test_what_is_no_result_is_told(tmp_path, result, complaint):
    with pytest.raises(RecordsError, match=complaint):
        read_benchmark_result(written(tmp_path, result), PROMISE)


def test_what_is_not_json_is_told_and_ours_are_not_theirs(tmp_path):
    path = tmp_path / "records.jsonl"
    write_records(path, read_benchmark_result(written(tmp_path, VLLM), PROMISE).records, {})
    assert not is_benchmark_result(path)
    path.write_text("{ hello")
    with pytest.raises(RecordsError, match="not JSON"):
        read_benchmark_result(path, PROMISE)
    with pytest.raises(RecordsError, match="No such file"):
        read_benchmark_result(tmp_path / "gone", PROMISE)
    assert not is_benchmark_result(tmp_path / "gone")
