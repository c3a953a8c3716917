"""A part of a file is read without the rest, and bad rows can be left out."""

import itertools
import json
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slosched.workload import read_trace, write_trace
from slosched.workload.readers import read as reading
from slosched.workload.readers.json_items import json_items
from slosched.workload.readers.rows import BadRows
from slosched.workload.trace import Trace, TraceError, TraceRequest

MOONCAKE = Path(__file__).parents[3] / "shared" / "traces" / "mooncake_conversation.jsonl"
NUM_ROWS = 100_000


def csv_file(folder: Path, num_rows: int = NUM_ROWS, end: str = "") -> Path:
    """Write rows that are a quarter of a second apart."""
    path = folder / "big.csv"
    with path.open("w") as file:
        file.write("arrival_s,input_tokens,output_tokens\n")
        file.writelines(f"{i / 4},{10 + i % 90},{1 + i % 7}\n" for i in range(num_rows))
        file.write(end)
    return path


def json_list(folder: Path, num_rows: int, indent: int | None = None) -> Path:
    """Write conversations of one question and one answer, on one line unless indented."""
    path = folder / "big.json"
    turns = [{"from": "human", "value": "why? " * 50}, {"from": "gpt", "value": "so “it” is"}]
    items = [{"id": i, "conversations": turns} for i in range(num_rows)]
    path.write_text(json.dumps(items, indent=indent, ensure_ascii=False), encoding="utf-8")
    return path


def test_the_first_rows_are_read_without_the_rest(tmp_path):
    path = csv_file(tmp_path, end="this is no row\n")
    tracemalloc.start()
    trace = read_trace(path, num_requests=1000)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(trace) == 1000
    assert path.stat().st_size > 1_000_000
    assert peak_bytes < 1_000_000  # 1,000 requests and a buffer
    first_bytes = trace.provenance["first_bytes"]
    assert path.read_bytes()[:first_bytes].count(b"\n") == 1001
    assert "sha256" not in trace.provenance
    with pytest.raises(TraceError, match=f"line {NUM_ROWS + 2}"):
        read_trace(path)


def test_a_part_that_is_the_whole_has_the_digest_of_the_whole(tmp_path):
    path = csv_file(tmp_path, 50)
    whole = read_trace(path)
    asked = read_trace(path, num_requests=51)
    assert asked.provenance["sha256"] == whole.provenance["sha256"]
    assert asked.requests == whole.requests


def test_a_window_is_read_without_what_comes_behind(tmp_path):
    path = csv_file(tmp_path, 1000, end="this is no row\n")
    trace = read_trace(path, start_s=100.0, duration_s=20.0)
    assert len(trace) == 80
    assert trace.requests[0].request_id == "402"  # its line number
    assert trace.arrivals_s[[0, -1]].tolist() == [0, 19.75]
    assert len(read_trace(path, start_s=100.0, duration_s=20.0, num_requests=5)) == 5
    with pytest.raises(TraceError, match=r"holds no request in \[900, 901\) s"):
        read_trace(csv_file(tmp_path, 1000), start_s=900, duration_s=1)
    for start_s, duration_s in ((-1, 5), (0, 0), (float("nan"), 5)):
        with pytest.raises(ValueError, match="start_s >= 0 and a duration_s > 0"):
            read_trace(path, start_s=start_s, duration_s=duration_s)
    with pytest.raises(ValueError, match="num_requests"):
        read_trace(path, num_requests=0)


def test_rows_out_of_order_are_all_there_unless_a_window_is_asked_for(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("arrival_s,input_tokens,output_tokens\n5,1,1\n3,2,1\n6,3,1\n")
    assert read_trace(path).prompt_tokens.tolist() == [2, 1, 3]
    assert read_trace(path, num_requests=2).prompt_tokens.tolist() == [2, 1]
    assert read_trace(path, duration_s=10).prompt_tokens.tolist() == [1, 3]  # since the first row


@pytest.mark.parametrize("indent", [None, 1])
def test_a_list_of_json_is_read_item_by_item(tmp_path, indent):
    path = json_list(tmp_path, 3000, indent)
    trace = read_trace(path, num_requests=100, count_tokens=lambda text: len(text.split()))
    assert set(trace.prompt_tokens.tolist()) == {50}
    assert set(trace.output_tokens.tolist()) == {3}
    assert trace.provenance["first_bytes"] < path.stat().st_size / 4
    assert len(read_trace(path)) == 3000


def test_a_list_of_json_that_breaks_off_is_not_taken_for_whole(tmp_path):
    path = json_list(tmp_path, 30)
    text = path.read_text(encoding="utf-8")
    for end in (len(text) - 1, len(text) - 40, len(text) - 9, len(text) // 2):
        path.write_text(text[:end], encoding="utf-8")
        with pytest.raises(TraceError, match=r"line 1, column \d+: not JSON"):
            read_trace(path)
    for wrong in ("[ITEM, ]", "[, ITEM]", "[ITEM ITEM]", "[ITEM,, ITEM]", "[ITEM", "[ITEM,"):
        path.write_text(wrong.replace("ITEM", '{"conversations": []}'))
        with pytest.raises(TraceError, match="not JSON"):
            read_trace(path)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=30),
    lambda inside: st.lists(inside, max_size=3) | st.dictionaries(st.text(max_size=5), inside),
    max_leaves=6,
)


@given(
    st.lists(st.dictionaries(st.text(max_size=5), json_values, max_size=3), max_size=6),
    st.sampled_from([None, 0, 3]),
    st.integers(1, 40),
    st.booleans(),
)
def test_a_list_is_the_same_however_it_is_cut_into_chunks(items, indent, size, is_ascii):
    text = "# a note\n" + json.dumps(items, indent=indent, ensure_ascii=is_ascii)
    chunks = (text[i : i + size] for i in range(0, len(text), size))
    rows = list(json_items(Path("list"), chunks, BadRows()))
    assert [row.values for row in rows] == items
    assert [row.number for row in rows] == list(range(1, len(items) + 1))


@pytest.mark.parametrize("num_requests", [1, 7, 1234])
def test_the_first_of_rounded_times_are_spread_as_in_the_whole(num_requests):
    if not MOONCAKE.exists():
        pytest.skip(f"{MOONCAKE} is not on this machine")
    part = read_trace(MOONCAKE, num_requests=num_requests)
    assert part.provenance["timestamps_spread_over_s"] == 3.0
    assert part.requests == read_trace(MOONCAKE).head(num_requests).requests


def test_a_file_too_long_for_memory_says_how_to_read_a_part(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "MAX_REQUESTS", 40)
    path = csv_file(tmp_path, 41)
    with pytest.raises(TraceError, match=r"more than 40 requests, .*num_requests .-n.*--start"):
        read_trace(path)
    assert len(read_trace(path, num_requests=40)) == 40
    long = csv_file(tmp_path, 400)
    assert len(read_trace(long, start_s=50, duration_s=10)) == 40  # skipped rows do not count
    with pytest.raises(TraceError, match=r"more than 40 requests in \[50, 61\) s"):
        read_trace(long, start_s=50, duration_s=11)
    assert len(read_trace(csv_file(tmp_path, 40))) == 40


def test_parquet_is_read_in_batches(tmp_path):
    path = tmp_path / "t.parquet"
    requests = [TraceRequest(str(i), float(i), 5, 5) for i in range(20_000)]
    write_trace(Trace.of(requests, "long"), path)
    assert [r.request_id for r in read_trace(path, num_requests=3).requests] == ["0", "1", "2"]
    assert len(read_trace(path, start_s=10_000)) == 10_000


def test_parquet_with_a_spoilt_page_is_named(tmp_path):
    path = tmp_path / "t.parquet"
    write_trace(Trace.of([TraceRequest("a", 0.0, 5, 5)], "short"), path)
    with path.open("r+b") as file:
        file.seek(len(b"PAR1"))
        file.write(b"\xff" * 30)
    with pytest.raises(TraceError, match=r"t\.parquet, row 1: not Parquet that can be read"):
        read_trace(path)


BAD = """arrival_s,input_tokens,output_tokens
0,5,5
1,0,5
2,5,-1
nan,5,5
4,5
inf,5,5
6,7,8
7,ten,5
"""


def test_bad_rows_are_left_out_and_counted_where_that_is_asked_for(tmp_path):
    path = tmp_path / "bad.csv"
    path.write_text(BAD)
    trace = read_trace(path, skip_bad=True)
    assert trace.arrivals_s.tolist() == [0, 6]
    assert trace.provenance["rows_bad"] == 6
    assert trace.provenance["rows_bad_are"] == (
        "input_tokens: 2, arrival_s: 2, output_tokens: 1, number of values: 1"
    )
    with pytest.raises(TraceError, match=r"bad.csv, line 3: input_tokens is '0'.*--skip-bad"):
        read_trace(path)


@pytest.mark.parametrize(
    ("text", "kept", "why"),
    [
        ('{"timestamp": 0, "input_length": 5, "output_length": 5}\n{oh\n[1]\n', 1, "not JSON: 1"),
        ('[{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}, '
         '5, {"conversations": 7}]', 1, "no object: 1, conversations: 1"),
        ("request_id,arrival_s,num_prompt_tokens,num_output_tokens,slo_ttft_s,slo_tpot_s,slo_e2e_s\n"
         "a,0,5,5,,,\nb\x07,1,5,5,,,\n", 1, "request: 1"),
    ],
)  # fmt: skip
def test_bad_rows_of_other_files(tmp_path, text, kept, why):
    path = tmp_path / "bad"
    path.write_text(text)
    trace = read_trace(path, skip_bad=True)
    assert len(trace) == kept
    assert why in str(trace.provenance["rows_bad_are"])
    with pytest.raises(TraceError, match=r"bad, (line|item) [23]:.*--skip-bad"):
        read_trace(path)


def test_a_spoilt_header_of_ours_is_a_bad_row(tmp_path):
    path = tmp_path / "ours.jsonl"
    write_trace(Trace.of([TraceRequest("a", 0.0, 5, 5)], "ours"), path)
    path.write_text("{oh\n" + path.read_text().splitlines()[1])
    trace = read_trace(path, skip_bad=True)
    assert [request.request_id for request in trace.requests] == ["a"]
    assert trace.provenance["rows_bad_are"] == "not JSON: 1"


def test_a_file_of_bad_rows_alone_holds_nothing(tmp_path):
    path = tmp_path / "bad.csv"
    lines = BAD.splitlines()
    path.write_text("\n".join(itertools.chain(lines[:1], lines[2:6])))
    with pytest.raises(TraceError, match=r"4 bad rows were skipped, first .*line 2: input_tokens"):
        read_trace(path, skip_bad=True)
