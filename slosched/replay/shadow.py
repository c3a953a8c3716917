"""The folder of a server in shadow mode: its steps, its requests, and its limits.

`steps.csv` is a profile, `trace.jsonl` a trace, and `records.jsonl` says when each token came out,
all in the formats that other commands read, too.  Each line is written when it is known, so every
end of a server leaves a folder that can be read.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from slosched.append_line import append_line
from slosched.core import DeadlineRule, EndReason, Request, SloschedError
from slosched.metrics import RequestRecord
from slosched.perfmodel import Profile, read_profile
from slosched.replay.files import append_record, read_records, write_records
from slosched.replay.json_fields import Fields
from slosched.workload import Trace, TraceRequest, read_trace
from slosched.workload.readers.own import append_request, begin_trace
from slosched.workload.request import MAX_PRIORITY, MIN_PRIORITY

STEPS = "steps.csv"
_TRACE, _RECORDS, _REJECTED, _SERVER = (
    "trace.jsonl",
    "records.jsonl",
    "rejected.jsonl",
    "server.json",
)


class ShadowError(SloschedError, ValueError):
    """A folder is not what a server in shadow mode leaves."""


@dataclass(frozen=True)
class ServerFacts:
    """All that a replay has to know of the server besides the times of its steps."""

    policy: str
    """The policy that was to be tried."""
    max_num_batched_tokens: int
    max_num_seqs: int
    block_size: int
    num_blocks: int
    caches_prefixes: bool
    plans_ahead: bool
    """Whether a step is planned while the one before it runs."""
    deadline_rule: DeadlineRule
    max_chunk_tokens: int | None = None
    num_watermark_blocks: int = 0

    @classmethod
    def of(cls, values: object) -> ServerFacts:
        """Return the facts in a JSON object; raise ValueError for one that is missing or wrong."""
        fields = Fields.of(values)
        policy = fields.text("policy")
        if policy is None:
            raise fields.wrong("policy", "the spec of a policy")
        is_limited = fields.values.get("max_chunk_tokens") is not None
        return cls(
            policy=policy,
            max_num_batched_tokens=fields.at_least_one("max_num_batched_tokens"),
            max_num_seqs=fields.at_least_one("max_num_seqs"),
            block_size=fields.at_least_one("block_size"),
            num_blocks=fields.at_least_one("num_blocks"),
            caches_prefixes=fields.flag("caches_prefixes"),
            plans_ahead=fields.flag("plans_ahead"),
            deadline_rule=fields.member("deadline_rule", DeadlineRule),
            max_chunk_tokens=fields.at_least_one("max_chunk_tokens") if is_limited else None,
            num_watermark_blocks=fields.count("num_watermark_blocks", default=0),
        )


@dataclass(frozen=True)
class ShadowRun:
    """What a server in shadow mode wrote down."""

    server: ServerFacts
    profile: Profile
    trace: Trace
    records: Sequence[RequestRecord]
    rejected: Mapping[EndReason, int]
    """Requests that the policy would have rejected, by reason; empty if it was not asked."""


class ShadowFiles:
    """The files of one run, to which the server adds; the folder is made at once."""

    def __init__(self, folder: Path, server: ServerFacts) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        about: dict[str, object] = asdict(server)
        (folder / _SERVER).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
        block_size = server.block_size if server.caches_prefixes else None
        begin_trace(folder / _TRACE, "shadow", {"source": "a server in shadow mode"}, block_size)
        write_records(folder / _RECORDS, (), about)
        (folder / _REJECTED).touch()

    def note_end(
        self, request: Request, prefix_hashes: tuple[int, ...] = (), name: str | None = None
    ) -> None:
        """Write down a request that has ended, under its id or another name.

        A server may let its clients choose more than a trace can hold.
        """
        record = RequestRecord.from_request(request)
        name = name or record.request_id
        record = replace(record, request_id=name if name.isprintable() else ascii(name))
        append_record(self._folder / _RECORDS, record)
        told = TraceRequest(
            request_id=record.request_id,
            arrival_s=request.arrival_s,
            num_prompt_tokens=request.num_prompt_tokens,
            num_output_tokens=max(1, request.num_output_tokens),
            slo=request.slo,
            prefix_hashes=prefix_hashes,
            priority=min(max(request.priority, MIN_PRIORITY), MAX_PRIORITY),
            on_infeasible=request.on_infeasible,
        )
        append_request(self._folder / _TRACE, told)

    def note_rejection(self, request_id: str, reason: EndReason) -> None:
        """Write down that the policy would have rejected this request."""
        line = json.dumps({"request_id": request_id, "reason": reason}) + "\n"
        append_line(self._folder / _REJECTED, line)


def read_shadow(folder: Path) -> ShadowRun:
    """Read a folder; raise ShadowError, or the error of the file, if something is missing."""
    path = folder / _SERVER
    if not path.is_file():
        runs = sorted(each.parent.name for each in folder.glob(f"*/{_SERVER}"))
        hint = f"; name one of its runs: {', '.join(runs)}" if runs else ""
        raise ShadowError(f"{folder} is not the folder of a server in shadow mode{hint}")
    try:
        server = ServerFacts.of(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, RecursionError) as error:
        raise ShadowError(f"{path} does not describe a server: {error}") from error
    trace, records = _in_both(
        read_trace(folder / _TRACE), read_records(folder / _RECORDS).records, folder
    )
    return ShadowRun(
        server=server,
        profile=read_profile(folder / STEPS),
        trace=trace,
        records=records,
        rejected=_read_rejected(folder / _REJECTED),
    )


def _in_both(
    trace: Trace, records: Sequence[RequestRecord], folder: Path
) -> tuple[Trace, Sequence[RequestRecord]]:
    """Leave out a request that is only in one of the two files: the server was ended in between."""
    ids = {r.request_id for r in trace.requests} & {record.request_id for record in records}
    requests = [r for r in trace.requests if r.request_id in ids]
    if not requests:
        raise ShadowError(f"{folder}: {_TRACE} and {_RECORDS} have no request in common")
    kept = Trace.of(requests, trace.name, trace.provenance, trace.prefix_block_tokens)
    return kept, [record for record in records if record.request_id in ids]


def _read_rejected(path: Path) -> Counter[EndReason]:
    """Count the rejections by reason; raise ShadowError for a line that tells of none."""
    found: Counter[EndReason] = Counter()
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            found[Fields.of(json.loads(line)).member("reason", EndReason)] += 1
        except (ValueError, RecursionError) as error:
            raise ShadowError(
                f"{path}, line {number} tells of no rejection: {error}; take the line out"
            ) from error
    return found
