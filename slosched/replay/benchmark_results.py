"""Results of the benchmarks of vLLM and SGLang as records, to be scored by the same code.

The files are those that `vllm bench serve --save-result --save-detailed` and SGLang's `python -m
sglang.bench_serving --output-details` write: one object whose lists have an entry a request:

* `input_lens`, `output_lens`: tokens;
* `ttfts`: seconds from sending a request to its first token;
* `itls`: for each request, the seconds between the chunks of its answer;
* `errors`: what went wrong, empty if nothing;
* `start_times` (vLLM alone): seconds on one clock at which each request was sent.

The files hold no SLO, so one must be given.  They do not tell rejection or preemption.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

from slosched.core import SLO, EndReason, RequestStatus
from slosched.metrics import RequestRecord
from slosched.replay.files import RecordsError, Replay, check_times
from slosched.replay.json_fields import is_count, is_number, shown

_LISTS = ("input_lens", "output_lens", "ttfts", "itls")
_SETTINGS = ("backend", "model_id", "request_rate", "burstiness", "max_concurrency", "duration")


def is_benchmark_result(path: Path) -> bool:
    """Tell whether the file looks like a result of these benchmarks, complete or not."""
    try:
        with path.open(encoding="utf-8") as file:
            start = file.read(65_536)
    except (OSError, UnicodeDecodeError):
        return False
    return start.lstrip().startswith("{") and "slosched-records" not in start[:200]


def read_benchmark_result(path: Path, slo: SLO) -> Replay:
    """Return the records of a result, each request with the SLO `slo`.

    If several results were appended to a file, the last one is read.  Without `start_times` all
    requests count as sent at the same time: latencies are right, rates are unknown (NaN).  Raises
    RecordsError for a file that is not such a result.
    """
    result = _last_result(path)
    missing = [name for name in _LISTS if not isinstance(result.get(name), list)]
    if missing:
        raise RecordsError(
            f"{path} has no {', '.join(missing)}; run vllm bench serve with --save-detailed, "
            "or sglang.bench_serving with --output-details"
        )
    num_requests = len(result["ttfts"])
    starts_s = _column(path, result, "start_times", [0.0] * num_requests)
    errors = _column(path, result, "errors", [""] * num_requests)
    rows = (starts_s, *(result[name] for name in _LISTS), errors)
    lengths = {len(row) for row in rows}
    if lengths != {num_requests} or not num_requests:
        raise RecordsError(f"{path}: its lists have {sorted(lengths)} entries, not one a request")
    for place, row in enumerate(zip(*rows, strict=True)):
        _check_row(path, place, *row)
    zero_s = min(starts_s)
    records = []
    for place, (start_s, *others) in enumerate(zip(*rows, strict=True)):
        try:
            records.append(_record(str(place), start_s - zero_s, *others, slo=slo))
        except ValueError as error:
            raise RecordsError(f"{path}: of request {place}, {error}") from error
    settings = {name: result[name] for name in _SETTINGS if name in result}
    return Replay(records, {"read from": path.name, **settings})


def _column(path: Path, result: Mapping[str, Any], name: str, default: list[Any]) -> list[Any]:
    """Return a list that a result need not have, `default` if it is missing or empty."""
    found = result.get(name) or default
    if not isinstance(found, list):
        raise RecordsError(f"{path}: {name} is {shown(found)}, not a list with an entry a request")
    return found


def _check_row(path: Path, place: int, start_s: object, *row: object) -> None:
    """Raise RecordsError, which names request and list, for an entry of another kind.

    Of a request that failed or emitted nothing, no times of tokens are looked at.
    """
    num_prompt_tokens, num_output_tokens, ttft_s, gaps_s, error = row
    are_gaps = isinstance(gaps_s, list) and all(map(is_number, gaps_s))
    has_tokens = not error and bool(num_output_tokens)
    wanted = [
        ("start_times", start_s, is_number(start_s), "a number of seconds"),
        ("input_lens", num_prompt_tokens, is_count(num_prompt_tokens), "a number of tokens"),
    ]
    if has_tokens:
        wanted += [
            ("output_lens", num_output_tokens, is_count(num_output_tokens), "a number of tokens"),
            ("ttfts", ttft_s, is_number(ttft_s), "a number of seconds"),
            ("itls", gaps_s, are_gaps, "a list of seconds"),
        ]
    for name, value, is_right, what in wanted:
        if not is_right:
            raise RecordsError(
                f"{path}: of request {place}, {name} is {shown(value)}, not {what}; run the "
                "benchmark again, or take the request out of every list"
            )


def _record(
    request_id: str,
    start_s: float,
    num_prompt_tokens: int,
    num_output_tokens: int | None,
    ttft_s: float,
    gaps_s: list[float],
    error: str | None,
    *,
    slo: SLO,
) -> RequestRecord:
    times_s = (
        []
        if error or not num_output_tokens
        else _times_s(start_s + ttft_s, gaps_s, int(num_output_tokens))
    )
    check_times(start_s, times_s)
    return RequestRecord(
        request_id=request_id,
        arrival_s=start_s,
        num_prompt_tokens=int(num_prompt_tokens),
        num_output_tokens=len(times_s),
        slo=slo,
        status=RequestStatus.FINISHED if times_s else RequestStatus.ABORTED,
        end_reason=EndReason.STOP if times_s else EndReason.FAULT,
        token_times_s=times_s,
        end_s=times_s[-1] if times_s else None,
    )


def _times_s(first_s: float, gaps_s: list[float], num_tokens: int) -> list[float]:
    """Return the time of each token, where tokens are spread evenly over the chunks.

    The first token is in the first chunk and the last in the last.  So TTFT, TPOT and the
    end-to-end time are exact, whatever the chunks hold.
    """
    chunks_s = list(accumulate(gaps_s, initial=first_s))
    if num_tokens == 1:
        return chunks_s[:1]
    last = len(chunks_s) - 1
    return [chunks_s[j * last // (num_tokens - 1)] for j in range(num_tokens)]


def _last_result(path: Path) -> dict[str, Any]:
    """Read the object of a JSON file, or of the last line of a JSONL file."""
    try:
        text = path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise RecordsError(f"cannot read the result {path}: {error.strerror}") from error
    try:
        result = json.loads(text)
    except ValueError:
        try:
            result = json.loads(text.splitlines()[-1])
        except ValueError as error:
            raise RecordsError(f"{path} is not JSON: {error}") from error
    if not isinstance(result, dict):
        raise RecordsError(f"{path} holds {shown(result)}, not the result of a benchmark")
    return result
