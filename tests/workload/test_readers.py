"""Trace files: the public formats, slosched's own, and errors about bad rows."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from slosched.core import NO_SLO, SLO
from slosched.workload.readers import read_trace, write_trace
from slosched.workload.trace import Trace, TraceError, TraceRequest

TRACES = Path(__file__).parents[3] / "shared" / "traces"

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,3180,8
2023-11-17 18:17:03.9799600,110,27
"""
OWN = "request_id,arrival_s,num_prompt_tokens,num_output_tokens,slo_ttft_s,slo_tpot_s,slo_e2e_s\n"


def written(folder: Path, text: str, name: str = "trace.csv") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_azure_times_become_seconds_since_the_first(tmp_path):
    trace = read_trace(written(tmp_path, AZURE))
    assert trace.arrivals_s == pytest.approx([0, 0.052, 86_400], abs=2e-6)
    assert trace.prompt_tokens.tolist() == [4808, 3180, 110]
    assert trace.output_tokens.tolist() == [10, 8, 27]
    assert trace.provenance["format"] == "azure"
    assert len(str(trace.provenance["sha256"])) == 64


def test_azure_2024_times_name_their_zone(tmp_path):
    rows = ["2024-05-10 00:00:01.5+00:00,1,1", "2024-05-10 02:00:02+02:00,1,1"]
    text = "\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows])
    assert read_trace(written(tmp_path, text)).arrivals_s == pytest.approx([0, 0.5])


def test_generic_times_may_be_negative_and_unsorted(tmp_path):
    text = "arrival_s,client,input_tokens,output_tokens\n-1,x,5,1\n-3.5,y,6,2\n0,z,7,3\n"
    trace = read_trace(written(tmp_path, text))
    assert trace.arrivals_s.tolist() == [0, 2.5, 3.5]
    assert trace.prompt_tokens.tolist() == [6, 5, 7]
    assert trace.provenance["rows_out_of_order"] == 1


def mooncake(*timestamps_ms: int) -> str:
    return "".join(
        f'{{"timestamp": {t}, "input_length": {i + 1}, "output_length": 1, "hash_ids": [0]}}\n'
        for i, t in enumerate(timestamps_ms)
    )


def test_quantised_timestamps_are_spread_within_their_quantum_in_file_order(tmp_path):
    path = written(tmp_path, mooncake(*[0] * 4, *[3000] * 5, *[6001] * 4), "m.jsonl")
    trace = read_trace(path)
    starts = np.repeat([0, 3.0, 6.001], [4, 5, 4])
    # Times are counted from the first request, which is somewhere in the first quantum.
    lower, upper = starts - trace.arrivals_s, starts + 3.001 - trace.arrivals_s
    assert lower.max() <= upper.min()
    assert (np.diff(trace.arrivals_s) > 0).all()
    assert trace.prompt_tokens.tolist() == list(range(1, 14))
    assert read_trace(path).requests == trace.requests


def test_timestamps_that_are_not_quantised_are_left_alone(tmp_path):
    trace = read_trace(written(tmp_path, mooncake(0, 10, 10, 25, 31), "m.jsonl"))
    assert trace.arrivals_s == pytest.approx([0, 0.010, 0.010, 0.025, 0.031])


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        (AZURE.replace("3180", "many"), 3, "ContextTokens is 'many'; expected a whole number"),
        (AZURE.replace("3180", "0"), 3, "ContextTokens is '0'; expected a whole number"),
        (AZURE.replace("3180", "-5"), 3, "ContextTokens is '-5'"),
        (AZURE.replace("3180", "1.5"), 3, "ContextTokens is '1.5'"),
        (AZURE.replace("3180", "9" * 5000), 3, "ContextTokens is '999"),
        (AZURE.replace(",27", ""), 4, r"2 values \['2023-11-17 18:17:03.9799600', '110'\]"),
        (AZURE.replace(",27", ",27,1"), 4, "4 values"),
        (AZURE.replace("2023-11-17", "yesterday"), 4, "TIMESTAMP is 'yesterday 18"),
        ("arrival_s,input_tokens,output_tokens\n1,1,1\nnan,1,1\n", 3, "arrival_s is 'nan'"),
        ("arrival_s,input_tokens,output_tokens\n1,1.0,1\n2,1.5,1\n", 3, "input_tokens is '1.5'"),
        ("arrival_s,input_tokens,output_tokens\n1,1,1\n\ninf,1,1\n", 4, "arrival_s is 'inf'"),
        ("arrival_s,input_tokens,output_tokens\n1,1,1\n1e300,1,1\n", 3, "arrival_s is '1e300'"),
        ("arrival_s,input_tokens,output_tokens\n-1e13,1,1\n", 2, r"seconds in \[-1e\+12, 1e\+12"),
        (mooncake(0, 1) + '{"timestamp": 2,\n', 3, "not JSON"),
        (mooncake(0, 1) + "[1]\n", 3, "expected a JSON object"),
        (mooncake(0, 1) + "null\n", 3, "expected a JSON object, not None"),
        (mooncake(0).replace("1, ", "true, ", 1) + mooncake(1), 1, "input_length is True"),
        (mooncake(0) + '{"timestamp": 1, "output_length": 1}\n', 2, "input_length is missing"),
        (mooncake(0) + mooncake(1).replace(": 1,", ": -1,", 1), 2, "timestamp is -1"),
        (OWN + "a,0,1,1,-1,1,\n", 2, "slo_ttft_s is '-1'; expected a positive"),
        (OWN + "a,0,1,1,1,0,\n", 2, "slo_tpot_s is '0'"),
        (OWN + "a,0,1,1,1,1,soon\n", 2, "slo_e2e_s is 'soon'"),
        (OWN + ",0,1,1,1,1,\n", 2, "request_id"),
    ],
)
def test_a_malformed_row_names_file_line_value_and_expectation(tmp_path, text, line, says):
    path = written(tmp_path, text)
    with pytest.raises(TraceError, match=says) as error:
        read_trace(path)
    assert f"{path}, line {line}:" in str(error.value)


@pytest.mark.parametrize("first", ["3", '"x"', "null"])
def test_the_first_line_of_jsonl_is_one_of_jsonl_whatever_it_holds(tmp_path, first):
    path = tmp_path / "t.jsonl"
    path.write_text(f"{first}\n{mooncake(0, 1)}")
    with pytest.raises(TraceError, match=r"t\.jsonl, line 1: expected a JSON object, not"):
        read_trace(path)
    assert len(read_trace(path, skip_bad=True)) == 2


@pytest.mark.parametrize("text", ["", "\n\n", "TIMESTAMP,ContextTokens,GeneratedTokens\n", "# x\n"])
def test_a_file_without_rows_is_empty(tmp_path, text):
    with pytest.raises(TraceError, match="is empty"):
        read_trace(written(tmp_path, text))


def test_what_is_no_trace_is_refused_with_what_one_looks_like(tmp_path):
    with pytest.raises(TraceError, match="columns a, b; expected one of azure: TIMESTAMP"):
        read_trace(written(tmp_path, "a,b\n1,2\n"))
    with pytest.raises(TraceError, match="unknown trace format 'parquet'"):
        read_trace(written(tmp_path, AZURE), format="parquet")
    with pytest.raises(TraceError, match="arrival_s is missing"):
        read_trace(written(tmp_path, AZURE), format="generic")
    with pytest.raises(FileNotFoundError):
        read_trace(tmp_path / "absent.csv")
    binary = tmp_path / "b.csv"
    binary.write_bytes(b"\x93NUMPY\xff\xfe")
    with pytest.raises(TraceError, match="not a text file"):
        read_trace(binary)


def test_our_own_columns_need_no_promise(tmp_path):
    text = "num_output_tokens,request_id,arrival_s,num_prompt_tokens\n30,a,0.5,200\n"
    (request,) = read_trace(written(tmp_path, text)).requests
    assert (request.request_id, request.slo) == ("a", NO_SLO)
    assert (request.num_prompt_tokens, request.num_output_tokens) == (200, 30)


@pytest.mark.parametrize("separator", [";", "\t"])
def test_columns_that_are_not_separated_by_commas_are_refused(tmp_path, separator):
    text = "arrival_s,input_tokens,output_tokens\n0,5,5\n".replace(",", separator)
    with pytest.raises(TraceError, match="separate its columns by commas"):
        read_trace(written(tmp_path, text))


def test_a_column_that_is_there_twice_is_refused(tmp_path):
    text = "arrival_s,input_tokens,output_tokens,arrival_s\n0,5,5,9\n"
    with pytest.raises(TraceError, match="has two columns 'arrival_s'"):
        read_trace(written(tmp_path, text))


def test_two_requests_of_one_name_are_refused(tmp_path):
    with pytest.raises(TraceError, match="repeats request ids"):
        read_trace(written(tmp_path, OWN + "a,0,1,1,1,1,\na,1,1,1,1,1,\n"))


seconds = st.floats(1e-6, 1e6)
slos = st.builds(SLO, seconds, seconds, st.none() | seconds) | st.just(NO_SLO)
names = st.text(st.characters(codec="utf-8"), max_size=12)
request_ids = names.filter(lambda text: bool(text) and text.isprintable())


@st.composite
def traces(draw):
    ids = draw(st.lists(request_ids, min_size=1, max_size=8, unique=True))
    tokens = st.integers(1, 10**7)
    block = draw(st.none() | st.integers(1, 512))
    hashes = st.lists(st.integers(-(2**63) + 1, 2**63 - 1), max_size=0 if block is None else 4)
    requests = [
        TraceRequest(
            *(i, draw(st.floats(-1e6, 1e6)), draw(tokens), draw(tokens), draw(slos)),
            prefix_hashes=tuple(draw(hashes)),
            session_id=draw(st.none() | request_ids),
            priority=draw(st.just(0) | st.integers(-(2**31), 2**31 - 1)),
            lora_id=draw(st.none() | request_ids),
        )
        for i in ids
    ]
    provenance = st.dictionaries(names, names | st.integers() | seconds, max_size=3)
    return Trace.of(requests, draw(names), draw(provenance), block)


@given(traces(), st.sampled_from(["csv", "jsonl", "parquet"]))
def test_what_is_written_is_read_back_identically(tmp_path_factory, trace, suffix):
    path = tmp_path_factory.mktemp("trace") / f"trace.{suffix}"
    write_trace(trace, path)
    assert read_trace(path) == trace


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_the_hashes_of_a_long_prompt_are_read_back(tmp_path, suffix):
    hashes = tuple(range(2**62, 2**62 + 8000))
    trace = Trace.of([TraceRequest("a", 0.0, 128_000, 1, prefix_hashes=hashes)], "long", {}, 16)
    write_trace(trace, tmp_path / f"long{suffix}")
    assert read_trace(tmp_path / f"long{suffix}") == trace


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "t.csv",
            "arrival_s,input_tokens,output_tokens,priority,lora_id\n0,9,3,-1,sql\n1,9,3,,\n",
        ),
        (
            "t.jsonl",
            '{"arrival_s": 0, "input_tokens": 9, "output_tokens": 3, "priority": -1,'
            ' "lora_id": "sql"}\n{"arrival_s": 1, "input_tokens": 9, "output_tokens": 3,'
            ' "priority": null}\n',
        ),
    ],
)
def test_files_of_others_may_say_priority_and_adapter(tmp_path, name, text):
    trace = read_trace(written(tmp_path, text, name))
    assert [(r.priority, r.lora_id) for r in trace.requests] == [(-1, "sql"), (0, None)]


@pytest.mark.parametrize("cell", ["high", "1.5", "inf", "3000000000"])
def test_a_priority_that_is_none_names_line_value_and_expectation(tmp_path, cell):
    text = f"arrival_s,input_tokens,output_tokens,priority\n0,9,3,{cell}\n"
    with pytest.raises(TraceError, match=f"line 2: priority is '{cell}'; expected a whole number"):
        read_trace(written(tmp_path, text))


def test_jsonl_is_json_with_null_for_what_is_not_promised(tmp_path):
    requests = [TraceRequest("a", 0.0, 1, 2), TraceRequest("b", 0.5, 3, 4, SLO(1.0, 0.1))]
    path = tmp_path / "t.jsonl"
    write_trace(Trace.of(requests, "two", {"seed": 1}), path)

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    lines = path.read_text(encoding="utf-8").splitlines()
    header, first, second = (json.loads(line, parse_constant=refuse) for line in lines)
    assert header == {"slosched_trace": 1, "name": "two", "provenance": {"seed": 1}}
    assert [first[key] for key in ("slo_ttft_s", "slo_tpot_s", "slo_e2e_s")] == [None] * 3
    assert (second["request_id"], second["arrival_s"], second["slo_ttft_s"]) == ("b", 0.5, 1.0)


def test_parquet_keeps_its_provenance_in_the_metadata(tmp_path):
    path = tmp_path / "t.parquet"
    write_trace(Trace.of([TraceRequest("a", 0.0, 1, 2)], "one", {"seed": 1}), path)
    metadata = parquet.read_schema(path).metadata
    header = json.loads(metadata[b"slosched_trace"])
    assert header == {"slosched_trace": 1, "name": "one", "provenance": {"seed": 1}}
    assert parquet.read_table(path).to_pylist()[0]["num_output_tokens"] == 2


@pytest.mark.parametrize("suffix", [".csv", ".parquet", ".jsonl"])
def test_lengths_are_read_that_pandas_wrote_as_fractions(tmp_path, suffix):
    path = tmp_path / f"gaps{suffix}"
    gaps = {"arrival_s": [0.0, 1.0, 2.0], "input_tokens": [3, None, 5], "output_tokens": [1, 2, 3]}
    table = pd.DataFrame(gaps)
    if suffix == ".csv":
        table.to_csv(path, index=False)
    elif suffix == ".parquet":
        table.to_parquet(path)
    else:
        table.to_json(path, orient="records", lines=True)
    trace = read_trace(path, skip_bad=True)
    assert trace.prompt_tokens.tolist() == [3, 5]
    assert trace.provenance["rows_bad"] == 1


def test_a_parquet_of_others_is_recognised_by_its_columns(tmp_path):
    times = pd.to_datetime(["2023-11-16 18:17:03.97996", "2023-11-16 18:17:04.03196"])
    azure = pd.DataFrame({"TIMESTAMP": times, "ContextTokens": [5, 6], "GeneratedTokens": [7, 8]})
    azure.to_parquet(tmp_path / "azure.parquet")
    trace = read_trace(tmp_path / "azure.parquet")
    assert trace.arrivals_s == pytest.approx([0, 0.052], abs=2e-6)
    assert trace.provenance["format"] == "azure"
    assert len(str(trace.provenance["sha256"])) == 64
    own = {"arrival_s": [3.0, 4.5], "input_tokens": [1.0, 2.0], "output_tokens": [3, 4]}
    pd.DataFrame(own).to_parquet(tmp_path / "generic.parquet")
    trace = read_trace(tmp_path / "generic.parquet")
    assert (trace.arrivals_s.tolist(), trace.prompt_tokens.tolist()) == ([0, 1.5], [1, 2])
    pd.DataFrame(own | {"input_tokens": [1.0, None]}).to_parquet(tmp_path / "gap.parquet")
    with pytest.raises(TraceError, match=r"row 2: input_tokens is (nan|missing)"):
        read_trace(tmp_path / "gap.parquet")
    (tmp_path / "cut.parquet").write_bytes((tmp_path / "gap.parquet").read_bytes()[:500])
    with pytest.raises(TraceError, match="not a Parquet file that can be read"):
        read_trace(tmp_path / "cut.parquet")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"slosched_trace": 1, "name": 5}\n', "is empty"),
        ('{"slosched_trace": 1, "name": 5}\n{row}\n', "name and provenance are 5"),
        ('{"slosched_trace": 1}\n{row}\n{row}\n', "repeats request ids"),
        ('{row}\n{"slosched_trace": 1}\n', "line 2: request_id is missing"),
    ],
)
def test_a_header_of_jsonl_that_is_wrong(tmp_path, text, says):
    row = dict(zip(OWN.strip().split(","), ["a", 0, 1, 1, None, None, None], strict=True))
    path = written(tmp_path, text.replace("{row}", json.dumps(row)), "t.jsonl")
    with pytest.raises(TraceError, match=says):
        read_trace(path)


@pytest.mark.parametrize("name", ["t.csv", "t.jsonl"])
def test_a_trace_of_another_version_is_refused(tmp_path, name):
    path = tmp_path / name
    write_trace(Trace.of([TraceRequest("a", 0.0, 1, 2)], "one"), path)
    newer = path.read_text().replace("slosched-trace 1", "slosched-trace 2")
    path.write_text(newer.replace('"slosched_trace": 1', '"slosched_trace": 2'))
    with pytest.raises(TraceError, match="is of version 2 of slosched's traces"):
        read_trace(path)


@pytest.mark.parametrize(
    ("file", "n", "rate", "iat_cv", "idc_1s", "idc_60s", "prompt_mean", "output_p90"),
    [
        ("azure_code_2023.csv", 8819, 2.57, 13.2, 13, 164, 2048, 55),
        ("azure_conv_2023.csv", 19366, 5.53, 1.09, 1.4, 16, 1155, 424),
        ("mooncake_conversation.jsonl", 12031, 3.40, None, None, 2.9, 12035, 597),
        ("servegen_deepseek_r1_1h_5rps.csv", 17928, 4.98, None, None, None, 664, 1493),
    ],
)
def test_the_public_traces_have_the_published_statistics(
    file, n, rate, iat_cv, idc_1s, idc_60s, prompt_mean, output_p90
):
    """The expected statistics were computed from the published files."""
    if not (TRACES / file).exists():
        pytest.skip(f"{TRACES / file} is not on this machine")
    row = read_trace(TRACES / file).summary()
    assert row["n"] == n
    expected = {
        "rate": rate,
        "iat_cv": iat_cv,
        "idc_1s": idc_1s,
        "idc_60s": idc_60s,
        "prompt_mean": prompt_mean,
        "output_p90": output_p90,
    }
    for name, value in expected.items():
        if value is not None:
            assert row[name] == pytest.approx(value, rel=0.04), name
