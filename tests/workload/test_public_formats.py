"""Rows in the format of each trace's publisher, with their special cases."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from slosched.core import SLO
from slosched.workload.readers import FORMATS, estimate_tokens, read_trace
from slosched.workload.statistics import dispersion_of_counts
from slosched.workload.trace import TraceError

TRACES = Path(__file__).parents[3] / "shared" / "traces"

BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,0,1087,Conversation log
45,ChatGPT,1087,230,1317,Conversation log
118,GPT-4,417,276,693,API log
"""
BAILIAN = (
    '{"chat_id": 55, "parent_chat_id": -1, "timestamp": 60.5, "input_length": 40, '
    '"output_length": 7, "type": "text", "turn": 1, "hash_ids": [1, 2, 3]}\n'
    '{"chat_id": 159, "parent_chat_id": 55, "timestamp": 61.114, "input_length": 521, '
    '"output_length": 132, "type": "text", "turn": 2, "hash_ids": [1089, 1090]}\n'
)
SERVEGEN = "request_id,timestamp,input_tokens,output_tokens\n0,-7.5,10,20\n1,-7.25,30,40\n"
VIDUR = "arrived_at,num_prefill_tokens,num_decode_tokens\n0.5,10,20\n0.75,30,40\n"
LENGTHS = "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n74,918,992,0.08\n"


def turn(who: str, text: str) -> dict[str, str]:
    return {"from": who, "value": text}


SHAREGPT = [
    {"id": "a_0", "conversations": [turn("human", "How are\u2028you?"), turn("gpt", "Well.")]},
    {"id": "b_0", "conversations": [turn("gpt", "As I said"), turn("human", "Go on")]},
    {"id": "c_0", "conversations": []},
    {"id": "d_0", "conversations": [turn("human", ""), turn("gpt", "What?")]},
    {
        "id": "a_0",
        "conversations": [
            turn("system", "Be brief."),
            turn("human", "one two three"),
            turn("gpt", "four five"),
            turn("human", "and so on"),
        ],
    },
]


def written(folder: Path, text: str, name: str = "trace") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_burstgpt_leaves_out_failures_and_spreads_within_the_second(tmp_path):
    trace = read_trace(written(tmp_path, BURSTGPT))
    assert trace.prompt_tokens.tolist() == [472, 1087, 417]
    assert trace.output_tokens.tolist() == [18, 230, 276]
    # Each request arrives anywhere in its second; times are counted from the first one.
    assert np.abs(trace.arrivals_s - [0, 40, 113]).max() < 1
    assert (trace.arrivals_s % 1 != 0).sum() == 2
    noted = trace.provenance
    assert (noted["format"], noted["rows_left_out"]) == ("burstgpt", 1)
    assert noted["rows_left_out_are"] == "failed: no response tokens"
    assert (noted["timestamps_spread_over_s"], noted["spread_seed"]) == (1.0, 0)


def test_burstgpt_with_fractions_and_sessions_is_left_as_it_is(tmp_path):
    text = (
        "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,"
        "Log Type\n0.25,1,3.5,GPT-4,5,6,11,API log\n2,2,3.5,GPT-4,7,8,15,API log\n"
    )
    trace = read_trace(written(tmp_path, text))
    assert trace.arrivals_s.tolist() == [0, 1.75]
    assert "spread_seed" not in trace.provenance


def test_a_file_of_failures_alone_holds_no_request(tmp_path):
    text = "".join(BURSTGPT.splitlines(keepends=True)[i] for i in (0, 2))
    with pytest.raises(TraceError, match=r"every row was left out .failed: no response tokens"):
        read_trace(written(tmp_path, text))


def test_bailian_is_in_seconds_although_it_has_the_columns_of_mooncake(tmp_path):
    trace = read_trace(written(tmp_path, BAILIAN))
    assert trace.provenance["format"] == "bailian"
    assert trace.arrivals_s == pytest.approx([0, 0.614])
    assert trace.prompt_tokens.tolist() == [40, 521]
    assert trace.output_tokens.tolist() == [7, 132]


@pytest.mark.parametrize(("kind", "text"), [("servegen", SERVEGEN), ("vidur", VIDUR)])
def test_plain_formats_are_seconds_from_anywhere(tmp_path, kind, text):
    trace = read_trace(written(tmp_path, text))
    assert trace.provenance["format"] == kind
    assert trace.arrivals_s.tolist() == [0, 0.25]
    assert trace.prompt_tokens.tolist() == [10, 30]
    assert trace.output_tokens.tolist() == [20, 40]


def test_lengths_without_arrivals_get_poisson_ones_and_say_so(tmp_path):
    path = written(tmp_path, LENGTHS + "290,905,1195,0.32\n" * 4999)
    trace = read_trace(path)
    assert trace.prompt_tokens.tolist() == [74] + [290] * 4999
    assert trace.rate == pytest.approx(1.0)
    assert dispersion_of_counts(trace.arrivals_s, 1.0) == pytest.approx(1, abs=0.1)
    assert trace.provenance["arrivals"] == "made up: the file has none"
    assert read_trace(path) == trace
    other = read_trace(path, seed=1)
    assert other.arrivals_s.tolist() != trace.arrivals_s.tolist()
    assert other.prompt_tokens.tolist() == trace.prompt_tokens.tolist()


@pytest.mark.parametrize("lay_out", ["list", "indented list", "lines"])
def test_sharegpt_gives_the_first_question_and_answer(tmp_path, lay_out):
    text = {
        "list": json.dumps(SHAREGPT, ensure_ascii=False),
        "indented list": json.dumps(SHAREGPT, indent=2),
        "lines": "\n".join(json.dumps(item, ensure_ascii=False) for item in SHAREGPT),
    }[lay_out]
    trace = read_trace(written(tmp_path, text), count_tokens=lambda text: len(text.split()))
    assert trace.prompt_tokens.tolist() == [3, 5]
    assert trace.output_tokens.tolist() == [1, 2]
    assert trace.rate == pytest.approx(1.0)
    assert trace.provenance["rows_left_out"] == 3
    assert trace.provenance["tokens"] == "counted by the caller's tokenizer"


def test_sharegpt_without_a_tokenizer_says_how_it_estimates(tmp_path):
    trace = read_trace(written(tmp_path, json.dumps(SHAREGPT)))
    assert trace.prompt_tokens.tolist() == [4, 7]  # 3 words; 5 words
    assert "4/3 tokens a word" in str(trace.provenance["tokens"])


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("", 0),
        ("one two three", 4),
        ("a_long_identifier.of_some_length()", 9),  # 34 bytes
        ("航空公司", 6),  # 4 characters, 4 words
    ],
)
def test_the_estimate_by_hand(text, tokens):
    assert estimate_tokens(text) == tokens


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (BURSTGPT.replace("118,", "-1,"), r"line 5: Timestamp is '-1'; expected seconds in \[0"),
        (BURSTGPT.replace("118,", "nan,"), "line 5: Timestamp is 'nan'"),
        (BURSTGPT.replace("472", "0"), "line 2: Request tokens is '0'; expected a whole number"),
        (BURSTGPT.replace(",18,", ",-1,"), "line 2: Response tokens is '-1'.*at least 0"),
        (BAILIAN.replace("61.114", "NaN"), "line 2: timestamp is nan"),
        (BAILIAN.replace("61.114", "-1"), "line 2: timestamp is -1"),
        (BAILIAN.replace("521", "0"), "line 2: input_length is 0"),
        (BAILIAN.replace("521", "9" * 5000), "line 2: not JSON"),
        (SERVEGEN.replace("-7.25", ""), "line 3: timestamp is ''; expected a number of seconds"),
        (VIDUR.replace("40", "0"), "line 3: num_decode_tokens is '0'"),
        ('[{"conversations": 5}]', "item 1: conversations is 5; expected a list of turns"),
        ('[{"conversations": [{"from": "human"}]}]', "item 1: conversations is .*`value`"),
        ('[{"conversations": []}, 5]', "item 2: expected a JSON object, not 5"),
        ('# a note\n[{"conversations": []},\n {]', "line 3, column 3: not JSON"),
        (BAILIAN.replace("[1089", "[1e400"), "line 2: hash_ids is .inf, 1090.; expected a list of"),
        (BAILIAN.replace("[1089", "[1.5"), "line 2: hash_ids is .1.5, 1090.; expected a list of"),
        ('[{"conversations": []}]\n[{"conversations": []}]', "line 2, column 1: .*behind the list"),
        (LENGTHS + '"' + "9" * 200_000 + '",1,1,1\n', "line 3: num_prefill_tokens is '999"),
        (LENGTHS.replace("\n", "\r"), "line 1: not CSV .new-line character"),
    ],
)
def test_a_bad_value_is_named_with_its_place(tmp_path, text, says):
    path = written(tmp_path, text)
    with pytest.raises(TraceError, match=says) as error:
        read_trace(path)
    assert str(error.value).startswith(str(path))
    assert len(str(error.value)) < 600


def test_rows_out_of_order_are_sorted_and_counted_or_refused(tmp_path):
    path = written(tmp_path, VIDUR + "0.6,50,60\n0.9,1,1\n")
    trace = read_trace(path)
    assert trace.prompt_tokens.tolist() == [10, 50, 30, 1]
    assert trace.provenance["rows_out_of_order"] == 1
    with pytest.raises(TraceError, match=r"line 4: arrived_at is '0.6'.*before that of line 3"):
        read_trace(path, unsorted="refuse")
    assert len(read_trace(written(tmp_path, VIDUR), unsorted="refuse")) == 2


def test_arrivals_before_zero_are_shifted_and_counted(tmp_path):
    path = written(tmp_path, "arrival_s,input_tokens,output_tokens\n-2,5,6\n-0.5,7,8\n1,9,10\n")
    trace = read_trace(path)
    assert trace.arrivals_s.tolist() == [0, 1.5, 3]
    assert trace.provenance["rows_before_zero"] == 2
    assert "rows_before_zero" not in read_trace(written(tmp_path, VIDUR)).provenance


def test_a_file_of_any_format_may_promise(tmp_path):
    text = "arrival_s,input_tokens,output_tokens,slo_ttft_s,slo_tpot_s\n0,5,6,0.5,0.05\n1,7,8,,2\n"
    trace = read_trace(written(tmp_path, text))
    assert [r.slo for r in trace.requests] == [SLO(0.5, 0.05), SLO(math.inf, 2.0)]
    wrong = written(tmp_path, text.replace("0.5,", "soon,"))
    with pytest.raises(TraceError, match="slo_ttft_s is 'soon'"):
        read_trace(wrong)


@pytest.mark.parametrize("arrivals", ["arrival_s", "timestamp"])
def test_a_file_of_any_format_may_have_sessions_and_their_pauses(tmp_path, arrivals):
    text = f"{arrivals},input_tokens,output_tokens,session_id,think_s\n0,5,6,a,\n1,7,8,a,2\n"
    trace = read_trace(written(tmp_path, text))
    assert [(r.session_id, r.think_s) for r in trace.requests] == [("a", None), ("a", 2.0)]


def test_formats_without_arrivals_are_never_out_of_order(tmp_path):
    assert read_trace(written(tmp_path, LENGTHS + "1,1,2,1\n"), unsorted="refuse").duration_s == 1


def test_every_format_is_recognised_before_one_whose_columns_it_has_too():
    kinds = list(FORMATS)
    for i, kind in enumerate(kinds):
        for earlier in kinds[:i]:
            assert not set(FORMATS[earlier].columns) <= set(FORMATS[kind].columns), (earlier, kind)


def test_the_public_lengths_of_sharegpt_are_read():
    path = TRACES / "sharegpt_8k_lengths.csv"
    if not path.exists():
        pytest.skip(f"{path} is not on this machine")
    trace = read_trace(path)
    assert trace.provenance["format"] == "lengths"
    assert len(trace) == 30_731
    assert (trace.requests[0].num_prompt_tokens, trace.requests[0].num_output_tokens) == (74, 918)


def test_mooncake_is_spread_over_its_three_seconds():
    path = TRACES / "mooncake_conversation.jsonl"
    if not path.exists():
        pytest.skip(f"{path} is not on this machine")
    trace = read_trace(path)
    assert trace.provenance["timestamps_spread_over_s"] == 3.0
    assert len(np.unique(trace.arrivals_s)) == len(trace)
    assert [int(r.request_id) for r in trace.requests] == list(range(1, len(trace) + 1))
