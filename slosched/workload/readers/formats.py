"""The formats of trace files: the columns that identify each, and the reader of its rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from slosched.workload.readers import own, quanta, sharegpt
from slosched.workload.readers.rows import Row
from slosched.workload.request import TraceError, TraceRequest
from slosched.workload.statistics import FloatArray

RowReader = Callable[[Row], TraceRequest | None]
"""A function from a row to its request, or to None if its publishers say it is not one."""


@dataclass(frozen=True, slots=True)
class Format:
    """The columns of a format, and the conversion of a row to a request."""

    columns: tuple[str, ...]
    reader: Callable[[], RowReader]
    """Makes a reader for one file, since a reader may remember earlier rows."""
    arrival: str | None
    """The column with the arrival times; None if there are none."""
    quantum_s: Callable[[FloatArray], float | None] = quanta.exact
    """Finds how coarsely a file's arrival times were rounded; None if they were not."""
    left_out: str = ""
    """A description of the rows that are not requests."""
    prefix_block_tokens: int | None = None
    """Prompt tokens for which one prefix hash stands."""


def _azure(row: Row) -> TraceRequest:
    return TraceRequest(
        request_id=str(row.number),
        arrival_s=row.timestamp_s("TIMESTAMP"),
        num_prompt_tokens=row.tokens("ContextTokens"),
        num_output_tokens=row.tokens("GeneratedTokens"),
    )


def _burstgpt(row: Row) -> TraceRequest | None:
    arrival_s = row.seconds_since_start("Timestamp")
    num_prompt_tokens = row.tokens("Request tokens")
    num_output_tokens = row.tokens("Response tokens", least=0)
    if num_output_tokens == 0:
        return None
    return TraceRequest(
        request_id=str(row.number),
        arrival_s=arrival_s,
        num_prompt_tokens=num_prompt_tokens,
        num_output_tokens=num_output_tokens,
        session_id=row.text("Session ID"),
    )


def _mooncake(row: Row) -> TraceRequest:
    return TraceRequest(
        request_id=str(row.number),
        arrival_s=row.milliseconds_since_start("timestamp"),
        num_prompt_tokens=row.tokens("input_length"),
        num_output_tokens=row.tokens("output_length"),
        prefix_hashes=row.hashes("hash_ids"),
    )


def _bailian_reader() -> RowReader:
    """Make a reader that follows each chat to the first chat of its session.

    A chat names the chat that it continues. A session is named by its first chat.
    """
    first_chats: dict[str, str] = {}

    def request(row: Row) -> TraceRequest:
        chat, parent = row.text("chat_id"), row.text("parent_chat_id")
        if chat is None:
            raise row.wrong("chat_id", "the number of a chat")
        before = chat if parent is None or parent == "-1" else parent
        first_chats[chat] = first_chats.get(before, before)
        return TraceRequest(
            request_id=str(row.number),
            arrival_s=row.seconds_since_start("timestamp"),
            num_prompt_tokens=row.tokens("input_length"),
            num_output_tokens=row.tokens("output_length"),
            prefix_hashes=row.hashes("hash_ids"),
            session_id=first_chats[chat],
        )

    return request


def _plain(arrival: str | None, prompt: str, output: str) -> RowReader:
    """Make a reader of rows with an arrival in seconds from any time zero, and two lengths."""

    def request(row: Row) -> TraceRequest:
        return TraceRequest(
            request_id=str(row.number),
            arrival_s=0.0 if arrival is None else row.seconds(arrival),
            num_prompt_tokens=row.tokens(prompt),
            num_output_tokens=row.tokens(output),
        )

    return request


def _plain_format(arrival: str | None, prompt: str, output: str) -> Format:
    columns = (prompt, output) if arrival is None else (arrival, prompt, output)
    return Format(columns, lambda: _plain(arrival, prompt, output), arrival)


FORMATS: Mapping[str, Format] = {
    "azure": Format(("TIMESTAMP", "ContextTokens", "GeneratedTokens"), lambda: _azure, "TIMESTAMP"),
    "burstgpt": Format(
        ("Timestamp", "Model", "Request tokens", "Response tokens"),
        lambda: _burstgpt,
        "Timestamp",
        quanta.of_whole_seconds,
        left_out="failed: no response tokens",
    ),
    # It comes before mooncake, since it has mooncake's columns, too, but in seconds.
    "bailian": Format(
        ("chat_id", "parent_chat_id", "timestamp", "input_length", "output_length"),
        _bailian_reader,
        "timestamp",
        prefix_block_tokens=16,
    ),
    "mooncake": Format(
        ("timestamp", "input_length", "output_length"),
        lambda: _mooncake,
        "timestamp",
        quanta.of_shared_times,
        prefix_block_tokens=512,
    ),
    "servegen": _plain_format("timestamp", "input_tokens", "output_tokens"),
    "generic": _plain_format("arrival_s", "input_tokens", "output_tokens"),
    "vidur": _plain_format("arrived_at", "num_prefill_tokens", "num_decode_tokens"),
    "lengths": _plain_format(None, "num_prefill_tokens", "num_decode_tokens"),
    "sharegpt": Format(
        ("conversations",),
        lambda: sharegpt.first_exchange,
        arrival=None,
        left_out="conversations that do not begin with a question and an answer",
    ),
    "slosched": Format(own.NEEDED, lambda: own.own_request, "arrival_s"),
}
"""The public formats, our own, and `generic` for any other file in seconds and tokens.

`azure` is Azure's CSV of 2023 and of 2024, `bailian` the Qwen-Bailian JSONL, `servegen` the
requests that ServeGen makes, and `vidur` and `lengths` Vidur's CSV with and without arrivals.
"""


def recognise(row: Row) -> str:
    """Return the name of the format whose columns the row has, or raise TraceError."""
    for name, known in FORMATS.items():
        if row.values.keys() >= set(known.columns):
            return name
    first = next(iter(row.values), "")
    if len(row.values) == 1 and (";" in first or "\t" in first):
        raise TraceError(
            f"{row.path} has a single column {first!r}: separate its columns by commas"
        )
    shapes = "; ".join(f"{name}: {', '.join(f.columns)}" for name, f in FORMATS.items())
    raise TraceError(
        f"{row.path} is no trace that we know: it has the columns "
        f"{', '.join(map(str, row.values))}; expected one of {shapes}"
    )
