"""Prefix hashes and sessions: they are read, kept by every operation, and give a hit rate."""

import math
from pathlib import Path

import pytest

from slosched.core import SLO
from slosched.workload import Trace, TraceError, TraceRequest, read_trace
from slosched.workload.statistics import describe_sessions, prefix_hit_rate

MOONCAKE = Path(__file__).parents[3] / "shared" / "traces" / "mooncake_conversation.jsonl"


def shared_trace() -> Trace:
    """Make three turns of one conversation, and one other request.

    Blocks have 16 tokens; the last one of a prompt may be partly full.
    """
    hashes = [(1, 2, 3), (1, 2, 4, 5), (9, 8), (1, 2, 4, 6, 7)]
    lengths = [40, 56, 32, 70]
    requests = [
        TraceRequest(str(i), float(i), n, 5, prefix_hashes=h, session_id="b" if i == 2 else "a")
        for i, (h, n) in enumerate(zip(hashes, lengths, strict=True))
    ]
    return Trace.of(requests, "shared", prefix_block_tokens=16)


def test_the_hit_rate_by_hand():
    # Of 14 blocks, (1, 2) and then (1, 2, 4) have been seen before.
    assert prefix_hit_rate([(1, 2, 3), (1, 2, 4, 5), (9, 8), (1, 2, 4, 6, 7)]) == 5 / 14
    # A block after different first blocks is no hit, even if it was seen before.
    assert prefix_hit_rate([(1, 2), (3, 2)]) == 0
    assert math.isnan(prefix_hit_rate([(), ()]))


def test_the_summary_says_what_is_shared_where_anything_is():
    row = shared_trace().summary()
    assert row["prefix_hit_rate"] == 5 / 14
    assert (row["sessions"], row["turns_mean"]) == (2, 2.0)
    plain = Trace.of([TraceRequest("a", 0.0, 1, 1)], "plain").summary()
    assert not {"prefix_hit_rate", "sessions", "turns_mean"} & plain.keys()
    assert describe_sessions([None, "x", None, "x"]) == {"sessions": 1, "turns_mean": 2.0}


@pytest.mark.parametrize(
    "change",
    [
        lambda trace: trace.scaled_to(9.0),
        lambda trace: trace.thinned_to(trace.rate / 2),
        lambda trace: trace.with_poisson_arrivals(),
        lambda trace: trace.head(2),
        lambda trace: trace.window(1.0, 2.0),
        lambda trace: trace.with_slo(SLO(1.0, 0.1)),
        lambda trace: trace.clipped(max_output_tokens=2).trace,
    ],
)
def test_operations_keep_hashes_sessions_and_block_size(change):
    trace = shared_trace()
    of = {r.request_id: r for r in trace.requests}
    changed = change(trace)
    assert changed.prefix_block_tokens == 16
    for r in changed.requests:
        was = of[r.request_id]
        assert (r.prefix_hashes, r.session_id) == (was.prefix_hashes, was.session_id)


def test_clipping_and_scaling_leave_as_many_hashes_as_blocks():
    clipped = shared_trace().clipped(max_prompt_tokens=33).trace
    assert [len(r.prefix_hashes) for r in clipped.requests] == [3, 3, 2, 3]
    quartered = shared_trace().with_lengths_scaled(0.25)
    assert quartered.prefix_block_tokens == 4
    for r in quartered.requests:
        assert len(r.prefix_hashes) == math.ceil(r.num_prompt_tokens / 4)
    assert quartered.summary()["prefix_hit_rate"] == 5 / 14


def test_hashes_without_a_block_size_are_refused():
    hashed = TraceRequest("a", 0.0, 20, 1, prefix_hashes=(1, 2))
    with pytest.raises(TraceError, match="prefix_block_tokens"):
        Trace.of([hashed], "x")
    with pytest.raises(TraceError, match="at least 1, not 0"):
        Trace.of([hashed], "x", prefix_block_tokens=0)
    with pytest.raises(TraceError, match="session_id must be printable"):
        TraceRequest("a", 0.0, 1, 1, session_id="a\nb")


def test_mooncake_has_the_published_hit_rate():
    """The file has one hash for each block of 512 tokens, and a hit rate of 36.6 %."""
    if not MOONCAKE.exists():
        pytest.skip(f"{MOONCAKE} is not on this machine")
    trace = read_trace(MOONCAKE)
    assert trace.prefix_block_tokens == 512
    assert trace.summary()["prefix_hit_rate"] == pytest.approx(0.366, abs=5e-4)
    for r in trace.requests:
        assert len(r.prefix_hashes) == math.ceil(r.num_prompt_tokens / 512)


def test_a_bailian_session_is_named_by_its_first_chat(tmp_path):
    rows = [(55, -1, [1, 2]), (159, 55, [1, 2, 7]), (160, -1, [9]), (200, 159, [1]), (300, 77, [4])]
    path = tmp_path / "bailian.jsonl"
    path.write_text(
        "".join(
            f'{{"chat_id": {chat}, "parent_chat_id": {parent}, "timestamp": {i}.5, '
            f'"input_length": 40, "output_length": 7, "turn": 1, "hash_ids": {hashes}}}\n'
            for i, (chat, parent, hashes) in enumerate(rows)
        )
    )
    trace = read_trace(path)
    # Chat 77 began before the file does.
    assert [r.session_id for r in trace.requests] == ["55", "55", "160", "55", "77"]
    assert [r.prefix_hashes for r in trace.requests] == [tuple(hashes) for *_, hashes in rows]
    assert trace.prefix_block_tokens == 16


def test_burstgpt_sessions_are_read_where_the_file_has_them(tmp_path):
    path = tmp_path / "b.csv"
    path.write_text(
        "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,"
        "Log Type\n0.25,7,3.5,GPT-4,5,6,11,API log\n2,,3.5,GPT-4,7,8,15,API log\n"
    )
    assert [r.session_id for r in read_trace(path).requests] == ["7", None]


@pytest.mark.parametrize("hashes", ['"a b"', "5", '["x"]', "[null]", f"[{2**70}]"])
def test_hashes_that_are_none_are_named(tmp_path, hashes):
    path = tmp_path / "m.jsonl"
    row = f'{{"timestamp": 0, "input_length": 5, "output_length": 5, "hash_ids": {hashes}}}\n'
    path.write_text(row)
    with pytest.raises(TraceError, match=r"line 1: hash_ids is .*whole numbers"):
        read_trace(path)
