"""Tests that records are read back as written, and that errors name the line."""

from __future__ import annotations

import json
import math
import re
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
        (lambda lines: [lines[0], lines[1].replace("0.1", "7.5")], "line 2.*one has 0.3 s.*7.5 s"),
    ],
)
def test_what_is_not_a_record_is_named_by_its_line(tmp_path: Path, change, complaint: str) -> None:
    path = tmp_path / "records.jsonl"
    write_records(path, RECORDS, {})
    path.write_text("\n".join(change(path.read_text().splitlines())))
    with pytest.raises(RecordsError, match=complaint):
        read_records(path)


@pytest.mark.parametrize("line", [1, 2])
@pytest.mark.parametrize("text", ["[]", "3", '"x"', "null", "[[1]]", "true"])
def test_a_line_that_is_no_object_is_told_as_what_it_is(
    tmp_path: Path, line: int, text: str
) -> None:
    lines = _lines(tmp_path)
    lines[line - 1] = text
    (tmp_path / "r.jsonl").write_text("\n".join(lines))
    told = re.escape(f"it is {json.loads(text)!r}, not a JSON object; mend that line")
    with pytest.raises(RecordsError, match=rf"r\.jsonl, line {line} is not what .*{told}"):
        read_records(tmp_path / "r.jsonl")


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("arrival_s", [], "a number"),
        ("arrival_s", None, "a number"),
        ("num_prompt_tokens", float("inf"), "a whole number of 0 or more"),
        ("num_prompt_tokens", "x", "a whole number of 0 or more"),
        ("num_swaps", -1, "a whole number of 0 or more"),
        ("priority", None, "a whole number"),
        ("slo_s", [1, 2], "a list of TTFT, TPOT and end-to-end time"),
        ("slo_s", 3, "a list of TTFT, TPOT and end-to-end time"),
        ("status", [], "one of waiting, running"),
        ("end_reason", 3, "one of stop, length"),
        ("token_times_s", [[1]], "a list of numbers"),
        ("end_s", "soon", "a finite number of seconds or null"),
        ("started_s", [], "a finite number of seconds or null"),
        ("program_s", {}, "a finite number of seconds or null"),
        ("tier", ["gold"], "a text or null"),
        ("tenant", {}, "a text or null"),
        ("session_id", 7, "a text or null"),
        ("is_relegated", "no", "true or false"),
    ],
)
def test_a_field_of_another_kind_is_told_with_what_belongs_there(
    tmp_path: Path, name: str, value: object, wanted: str
) -> None:
    lines = _lines(tmp_path)
    lines[1] = json.dumps({**json.loads(lines[1]), name: value})
    (tmp_path / "r.jsonl").write_text("\n".join(lines))
    told = re.escape(f"its {name} is {value!r}, not {wanted}")
    with pytest.raises(RecordsError, match=rf"line 2 is not what .*{told}"):
        read_records(tmp_path / "r.jsonl")


def _lines(folder: Path) -> list[str]:
    """Return the lines of a file with one record."""
    write_records(folder / "good.jsonl", RECORDS[:1], {"made": "here"})
    return (folder / "good.jsonl").read_text().splitlines()


def test_a_file_that_is_no_text_is_said_to_be_none(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RecordsError, match="not a text file"):
        read_records(path)
