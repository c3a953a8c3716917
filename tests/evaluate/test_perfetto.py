"""Tests that a replay's trace has Chrome's Trace Event Format and agrees with the records."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from replays import make_record, rejected, replays

from slosched.core import DeadlineRule, EndReason, RequestStatus
from slosched.evaluate.perfetto import trace_events, write_perfetto
from slosched.metrics import RequestRecord, StepRow

RULE = DeadlineRule.MEAN_TPOT
STEPS = [
    StepRow(10.0, 0.5, 0.4, 100, 0, 3, 1, 0, 0.25, 0),
    StepRow(10.5, 0.25, None, 100, 4, 2, 5, 1, 0.5, 1),
    StepRow(11.0, 0.25, None, 0, 4, 2, 5, 1, 0.5, 0),
]
REPLAY = [
    replace(make_record(10.5, 10.6, arrival_s=10.0, name="a"), started_s=10.1),
    make_record(12.5, 12.6, arrival_s=10.25, name="b"),
    replace(rejected(10.5, EndReason.EXPIRED), request_id="c", end_s=11.5),
    make_record(10.9, arrival_s=10.7, name="d", status=RequestStatus.RUNNING, reason=None),
]


def events(*phases: str, of: list[RequestRecord] = REPLAY) -> list[dict[str, Any]]:
    return [e for e in trace_events(of, STEPS, RULE) if e["ph"] in phases]


def test_requests_are_slices_with_their_phases_inside():
    slices = [e for e in events("X") if e["pid"] == 2]
    times = {(e["name"], e["ts"], round(e["ts"] + e["dur"], 3)) for e in slices}
    assert times == {
        ("a: good", 0.0, 600_000.0),
        ("waiting", 0.0, 100_000.0),
        ("prefill", 100_000.0, 500_000.0),
        ("decode", 500_000.0, 600_000.0),
        ("b: late", 250_000.0, 2_600_000.0),
        ("waiting and prefill", 250_000.0, 2_500_000.0),
        ("decode", 2_500_000.0, 2_600_000.0),
        ("c: rejected, expired", 500_000.0, 1_500_000.0),
        ("waiting", 500_000.0, 1_500_000.0),
        ("d: running", 700_000.0, 2_600_000.0),
        ("waiting and prefill", 700_000.0, 900_000.0),
    }
    about = next(e["args"] for e in slices if e["name"] == "a: good")
    assert about["TTFT (s)"] == pytest.approx(0.5)
    (instant,) = events("i")
    assert (instant["name"], instant["ts"], instant["s"]) == ("rejected, expired", 1.5e6, "t")


def test_steps_are_slices_and_counters():
    slices = [e for e in events("X") if e["pid"] == 1]
    assert [(e["name"], e["ts"], e["dur"]) for e in slices] == [
        ("prefill", 0.0, 500_000.0),
        ("mixed", 500_000.0, 250_000.0),
        ("decode", 1_000_000.0, 250_000.0),
    ]
    counters = defaultdict(list)
    for event in events("C"):
        counters[event["name"]].append(event["args"])
    assert counters["batch tokens"][1] == {"prefill": 100, "decode": 4}
    assert counters["requests"][1] == {"running": 5, "waiting": 2, "swapped": 1}
    assert [args["used"] for args in counters["KV cache (%)"]] == [25, 50, 50]


def test_every_lane_and_process_has_a_name():
    named = {(e["name"], e["pid"], e["tid"]): e["args"]["name"] for e in events("M")}
    assert named["process_name", 1, 0] == "device"
    assert named["process_name", 2, 0] == "requests"
    for event in events("X"):
        assert named["thread_name", event["pid"], event["tid"]]


@given(replays())
def test_the_format(replay):
    """Check that times rise from 0 on, and that slices of a lane nest or follow each other."""
    found = list(trace_events(replay, STEPS, RULE))
    json.dumps(found, allow_nan=False)
    timed = [e for e in found if e["ph"] != "M"]
    assert [e["ph"] for e in found[: len(found) - len(timed)]] == ["M"] * (len(found) - len(timed))
    assert {e["ph"] for e in timed} <= {"X", "C", "i"}
    times = [e["ts"] for e in timed]
    assert times == sorted(times)
    assert times[0] >= 0
    open_until = defaultdict(list)
    for event in timed:
        if event["ph"] != "X":
            continue
        assert event["dur"] >= 0
        lane = open_until[event["pid"], event["tid"]]
        end = event["ts"] + event["dur"]
        while lane and lane[-1] <= event["ts"] + 1e-3:
            lane.pop()
        assert all(end <= outer + 2e-3 for outer in lane), event
        lane.append(end)


def test_there_are_as_many_lanes_as_requests_at_a_time():
    one_by_one = [make_record(i + 0.5, i + 0.9, arrival_s=float(i)) for i in range(5)]
    lanes = {e["tid"] for e in events("X", of=one_by_one) if e["pid"] == 2}
    assert lanes == {1}
    at_once = [make_record(0.5, 0.9 + i) for i in range(5)]
    lanes = {e["tid"] for e in events("X", of=at_once) if e["pid"] == 2}
    assert lanes == {1, 2, 3, 4, 5}


@pytest.mark.parametrize("name", ["trace.json", "deep/trace.json.gz"])
def test_the_file_is_json_plain_or_compressed(tmp_path: Path, name: str):
    path = tmp_path / name
    write_perfetto(path, REPLAY, STEPS, RULE, {"policy": "edf", "where": Path("x")})
    data = path.read_bytes()
    if name.endswith("gz"):
        assert data[4:8] == bytes(4), "the time of writing, which would change the bytes"
    document = json.loads(gzip.decompress(data) if name.endswith("gz") else data)
    assert document["traceEvents"] == list(trace_events(REPLAY, STEPS, RULE))
    assert document["otherData"] == {"policy": "edf", "where": "x"}


def test_a_live_replay_has_no_steps_and_none_at_all_is_refused():
    assert {e["pid"] for e in trace_events(REPLAY, [], RULE)} == {2}
    with pytest.raises(ValueError, match="no requests"):
        list(trace_events([], STEPS, RULE))
