"""Tests that records are read back as written, and that errors name the line."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from slosched.core import NO_SLO, SLO, EndReason, RequestStatus
from slosched.metrics import RequestRecord
from slosched.replay.files import RecordsError, read_records, write_records

RECORDS = [
    RequestRecord(
        "a",
        0.1,
        12,
        2,
        SLO(0.5, 0.05, 9.0),
        RequestStatus.FINISHED,
        EndReason.STOP,
        (0.3, 0.4),
        0.4,
    ),
    RequestRecord("b", 0.2, 9, 0, NO_SLO, RequestStatus.REJECTED, EndReason.EXPIRED, (), 0.7),
    RequestRecord(
        "c", 0.3, 9, 1, SLO(1, math.inf), RequestStatus.RUNNING, None, (0.9,), None, 2, 1
    ),
    RequestRecord(
        "d",
        0.4,
        9,
        1,
        SLO(1, 2),
        RequestStatus.FINISHED,
        EndReason.LENGTH,
        (9.0,),
        9.0,
        session_id="s",
        program_s=60.0,
        is_relegated=True,
    ),
]


def test_records_come_back_with_their_provenance(tmp_path: Path) -> None:
    """Check any provenance; that of a trace has a `format`, too."""
    path = tmp_path / "deep" / "records.jsonl"
    write_records(path, RECORDS, {"format": "azure", "records": 3, "limits": {"seqs": 4}})
    replay = read_records(path)
    assert replay.records == RECORDS
    assert replay.provenance == {"format": "azure", "records": 3, "limits": {"seqs": 4}}


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda lines: [], "line 1"),
        (lambda lines: ["hello", *lines[1:]], "line 1"),
        (
            lambda lines: [lines[0].replace("records/1", "records/9"), *lines[1:]],
            "line 1.*records/9",
        ),
        (lambda lines: lines[1:], "line 1.*format"),
        (lambda lines: lines[:1], "holds no record"),
        (lambda lines: [*lines[:2], lines[2][:40]], "line 3"),
        (lambda lines: [*lines[:2], "[]"], "line 3"),
        (lambda lines: [*lines[:3], lines[3].replace("running", "asleep")], "line 4.*asleep"),
        (lambda lines: [lines[0], lines[1].replace("0.3", "NaN")], "line 2.*finite, not nan"),
        (lambda lines: [lines[0], lines[1].replace("0.3", "0.5")], "line 2.*0.4 s follows 0.5 s"),
        (lambda lines: [*lines[:2], lines[2].replace("0.2", "Infinity")], "line 3.*arrival.*inf"),
    ],
)
def test_what_is_not_a_record_is_named_by_its_line(tmp_path: Path, change, complaint: str) -> None:
    path = tmp_path / "records.jsonl"
    write_records(path, RECORDS, {})
    path.write_text("\n".join(change(path.read_text().splitlines())))
    with pytest.raises(RecordsError, match=complaint):
        read_records(path)


def test_a_file_that_is_no_text_is_said_to_be_none(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RecordsError, match="not a text file"):
        read_records(path)
