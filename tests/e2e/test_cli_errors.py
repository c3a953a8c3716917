"""Mistakes on the command line: one clear message that names the value, and no file is written."""

from __future__ import annotations

import errno
import gzip
import importlib
import json
import socket
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
from command_line import Said

from slosched.cli.console import what
from slosched.perfmodel.boosting import FEATURES
from slosched.perfmodel.store import MODEL_FORMAT

pytestmark = pytest.mark.e2e

Cli = Callable[..., Said]
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
FILES = {
    "bad.csv": f"{AZURE}2023-11-16 18:17:03.97,10,5\n2023-11-16 18:17:04.97,ten,5\n",
    "short.csv": f"{AZURE}2023-11-16 18:17:03.97,10\n",
    "empty.csv": AZURE,
    "zero.csv": "",
    "other.csv": "when,what\n1,2\n",
    "bad.jsonl": '{"timestamp": 0, "input_length": 5, "output_length": 5}\n{"timestamp": 1,\n',
    "long.csv": f"{AZURE}2023-11-16 18:17:03.97,10,5\n2023-11-16 18:17:04.97,99999999999,5\n",
    "one.csv": f"{AZURE}2023-11-16 18:17:03.97,10,5\n",
    "many.csv": f"{AZURE}2023-11-16 18:17:03.97,10,5\n2023-11-16 18:17:03.98,0,5\n",
    "at_once.csv": "arrival_s,input_tokens,output_tokens\n" + "0,10,5\n" * 1000,
    "bursts.csv": "arrival_s,input_tokens,output_tokens\n" + "0,10,5\n" * 1500 + "9,10,5\n" * 1500,
    "late.csv": "arrival_s,input_tokens,output_tokens\n"
    + "".join(f"{second},10,5\n" for second in range(1400))
    + "1400,10,5\n" * 100,
    "promise.csv": "request_id,arrival_s,num_prompt_tokens,num_output_tokens,slo_ttft_s,slo_tpot_s,"
    "slo_e2e_s\na,0,5,5,-1,0.1,\n",
    "bad.json": '{"format": "slosched-latency-model/7"}',
    "old.json": '{"format": "slosched-latency-model/1", "attention": "exact", "coefficients": {}}',
    "negative.json": '{"format": "slosched-latency-model/2", "form": "linear", "parameters": '
    '{"attention": "exact", "coefficients": {"per_token_s": -1, "per_attention_s": 0, '
    '"per_context_s": 0, "per_tile_s": 0, "any_decode_s": 0, "per_swapped_block_s": 0, '
    '"constant_s": 0}}}',
    "trees.json": json.dumps(
        {
            "format": MODEL_FORMAT,
            "form": "boosting",
            "parameters": {
                "features": FEATURES,
                "expected": {"baseline_s": 0.01, "trees": [[0, 9, 1.0, 2.0]]},
                "upper": {"baseline_s": 0.02, "trees": [1.0]},
                "per_swapped_block_s": 0,
                "constant_s": 0,
            },
        }
    ),
    "profile.csv": "batch,seconds\n64@0,0.1\n1@0,-3\n",
    "few.csv": "batch,seconds\n64@0,0.1\n",
    "decodes.csv": "batch,seconds\n" + "".join(f"1@{n}00,0.1{n}\n" for n in range(10, 40)),
    "records.jsonl": '{"format": "slosched-records/1", "provenance": {}}\n{"request_id": 1}\n',
}
"""The files that the mistakes below use, most of them invalid."""

# The command typed, and what its message must contain; `-o out` must write nothing.
MISTAKES: dict[str, tuple[str, ...]] = {
    # traces
    "trace show missing.csv": ("'missing.csv'", "No such file", "azure_conv"),
    "trace show .": ("'.'", "Is a directory"),
    "trace show bad.csv": ("bad.csv, line 3", "ContextTokens", "'ten'"),
    "trace show short.csv": ("short.csv, line 2", "2 values"),
    "trace show other.csv": ("other.csv", "when, what", "ContextTokens"),
    "trace show bad.jsonl": ("bad.jsonl, line 2", "not JSON"),
    "trace show long.csv": ("long.csv, line 3", "'99999999999'", "at most 10000000 tokens"),
    "bounds --trace long.csv": ("long.csv, line 3", "'99999999999'"),
    "trace show binary.dat": ("binary.dat", "not a text file"),
    "trace make promise.csv -o out": ("promise.csv, line 2", "slo_ttft_s", "'-1'"),
    "trace make empty.csv -o out": ("empty.csv is empty",),
    "trace make zero.csv -o out": ("zero.csv is empty",),
    "trace make azure_cov -o out": ("'azure_cov'", "mean azure_conv?", "azure_conv, azure_code"),
    "trace make poisson -n 5 --duration 10s -o out": ("5 requests (-n)", "--duration", "leave out"),
    "trace make poisson -n 0 -o out": ("--num-requests",),
    "trace make poisson -n 99999999999999999999 -o out": ("--num-requests", "1000000000"),
    "trace make poisson --rate 0 -o out": ("rate", "0.0"),
    "trace make poisson --rate nan -o out": ("rate", "nan"),
    "judge edf --trace one.csv -o ./one.csv": ("--out one.csv is the trace itself",),
    "trace make one.csv --slo-ttft 1s -o ./one.csv": ("--out one.csv is the trace itself",),
    "trace make one.csv --rate 3 -o out": ("no rate to change", "1 request"),
    "trace make one.csv --thin-to 3 -o out": ("no rate to change", "1 request"),
    "trace make one.csv --poisson -o out": ("no rate to change", "1 request"),
    "plan --trace at_once.csv --gpu h100=2 -o out": ("'at_once' has no rate", "1000 requests at"),
    "plan --trace bursts.csv -n 500 --gpu h100=2 -o out": (
        "'bursts' has no rate to change: it needs two arrivals at different times, but there are "
        "500 requests at one time in the window from request 1 on; give windows more requests",
    ),
    "plan --trace bursts.csv -n 500 --gpu h100=2 --rate 9 -o out": ("500 requests at one time in",),
    "capacity --trace bursts.csv -n 500 -o out": ("500 requests at one time in the window",),
    "plan --trace poisson -n 1 --gpu h100=2 -o out": ("'poisson' has no rate", "1 request"),
    "judge edf --trace at_once.csv": ("no rate to change", "there are 1000 requests at one time"),
    "judge edf --trace bursts.csv --scenario conv-tight": (
        "'bursts' has no rate to change",
        "200 requests at one time in the window from request 1 on; conv-tight plays it",
    ),
    "judge edf --trace late.csv --scenario conv-tight": (
        "there are 100 requests at one time in the window from request 1401 on",
    ),
    "bounds --trace at_once.csv --capacity 0.9": ("'at_once' has no rate", "1000 requests at one"),
    "capacity --trace at_once.csv -o out": ("'at_once' has no rate", "1000 requests at one time"),
    "tune --trace at_once.csv -o out": ("'at_once' has no rate", "1000 requests at one time"),
    "trace make poisson --length-scale -1 -o out": ("-1.0",),
    "trace make poisson --max-prompt-tokens 0 -o out": ("--max-prompt-tokens",),
    "trace make poisson --seed -1 -o out": ("--seed",),
    "trace make poisson --slo-ttft -1s -o out": ("--slo-ttft", "'-1s'", "positive"),
    "trace make poisson --slo-tpot soon -o out": ("--slo-tpot", "'soon'", "500ms"),
    "trace make poisson --slo-tpot 50 -o out": ("--slo-tpot", "'50'", "50ms or 50s"),
    "trace make poisson --slo-ttft 1000 -o out": ("--slo-ttft", "'1000'", "1000ms or 1000s"),
    "trace make poisson --slo-tier 1:1000/50 -o out": ("'1:1000/50'", "1000ms or 1000s"),
    "replay --trace agents --slo-program 600 -o out": ("--slo-program", "600ms or 600s"),
    "serve --emulate rtx4090/llama-3.1-8b --tier gold=on-infeasible:rejekt": (
        "on-infeasible must be one of reject, relegate, serve, not 'rejekt' (did you mean reject?)",
    ),
    "serve --emulate rtx4090/llama-3.1-8b --slo-tpot 50": ("--slo-tpot", "50ms or 50s"),
    "serve --emulate rtx4090/llama-3.1-8b --tier gold=tpot:50": ("'gold=tpot:50'", "50ms or 50s"),
    "trace make poisson --slo-ttft 3y -o out": ("--slo-ttft", "'3y'", "500ms"),
    "trace make poisson --slo-ttft 1s+2s -o out": ("--slo-ttft", "'1s+2s'", "0.5s+3x"),
    "trace make poisson --slo-ttft 3x -o out": ("--slo-ttft 3x", "--latency-model"),
    "trace make poisson --slo-tier 1:2s -o out": ("'1:2s'", "weight:TTFT/TPOT"),
    "trace make poisson --slo-tier x:1s/1s -o out": ("'x:1s/1s'", "weight:TTFT/TPOT"),
    "trace make poisson --slo-tier x:1s/2s -o out": ("the weight must be a number, not 'x'",),
    "trace make poisson --loras x -o out": (
        "'x' names no adapters (the number of adapters must be a whole number, not 'x'): write",
    ),
    "trace make poisson --loras 8:x -o out": ("the skew must be a number, not 'x'",),
    "trace make poisson --priority x:1 -o out": ("the share must be a number, not 'x'",),
    "trace make poisson --priority 0.2:x -o out": ("priority must be a whole number, not 'x'",),
    "trace make poisson --slo-tier -1:1s/1s -o out": ("not negative", "-1.0"),
    "trace make poisson --slo-tier 1:1s/1s --slo-tpot 9s -o out": ("leave out --slo-tpot",),
    "replay --speculate ngram:0 -o out": ("at least one token", "ngram:4"),
    "replay --speculate ngram:x -o out": ("must be a whole number, not 'x'; write ngram:4",),
    "replay --speculate ngram:4,min=x -o out": ("min must be a whole number, not 'x'",),
    "replay --speculate lookup:4 -o out": ("'lookup' is no way", "ngram:4"),
    "replay --speculate ngram:4,min=6 -o out": ("not min 6 and max 5",),
    "replay --speculate ngram:4 -o out": ("--acceptance",),
    "replay --slo-ttft 1s --slo-tier 1:1s/1s -o out": ("leave out --slo-ttft",),
    "replay --slo mlperf-llama2-70b -o out": ("'mlperf-llama2-70b'", "did you mean mlperf-llama2"),
    "replay --slo-tpot 1s --slo mlperf-deepseek-r1-server -o out": ("leave out --slo-tpot",),
    "trace make poisson --cv 2 -o out": ("cv", "'poisson'"),
    "trace make one.csv --cv 2 -o out": ("--cv", "'one.csv'"),
    "trace make poisson --start 5s -o out": ("--start", "'poisson'"),
    "trace make one.csv --start 5s -o out": ("one.csv", "no request in [5, inf) s"),
    "trace make one.csv --duration 0 -o out": ("--duration", "'0'"),
    "trace make many.csv -o out": ("many.csv, line 3", "ContextTokens", "'0'", "--skip-bad"),
    "trace make azure_conv_2024 -o out": ("'azure_conv_2024'", "slosched trace fetch azure_conv"),
    "trace make packed.gz -o out": ("packed.gz is compressed", "`gunzip packed.gz`"),
    "trace fetch azure_conv23": ("'azure_conv23'", "did you mean azure_conv_2023?"),
    "trace fetch azure": ("'azure'", "azure_conv_2023"),
    "trace fetch azure_conv_2023 --url http://127.0.0.1:9/t.csv -o out": (
        "cannot reach",
        "refused",
    ),
    "trace fetch azure_conv_2023 --sha256 abc -o out": ("64 hexadecimal digits", "'abc'"),
    "trace make poisson -o .": ("--out", "'.'"),
    "trace make poisson -o bad.csv/t.csv": ("--out", "bad.csv exists"),
    "replay -o bad.csv/out": ("--out", "bad.csv exists"),
    "replay --perfetto bad.csv/t.json": ("--perfetto", "bad.csv exists"),
    "fit few.csv --plot fit.xyz": ("--plot", "'fit.xyz'", ".png, .svg"),
    "fit few.csv --plot bad.csv/fit.png": ("--plot", "bad.csv exists"),
    # policies and replicas
    "replay --trace bad.csv -o out": ("bad.csv, line 3",),
    "replay --policy fifo -o out": ("'fifo'", "fcfs, sarathi"),
    "replay -p slo-aware -o out": ("'slo-aware'", "did you mean slo_aware?"),
    "replay -p edf:token_budgt=9 -o out": ("'token_budgt=9'", "did you mean token_budget?"),
    "replay -p mine/lifo.py:LIFO -o out": ("'mine/lifo.py'", "No such file"),
    "replay --latency-model= -o out": ("no latency model ''",),
    "bounds --capacity 90": ("--capacity", "'90'", "0.9 for 90 %"),
    "tune --target 99 -o out": ("--target", "'99'", "0.9 for 90 %"),
    "replay --policy fcfs:speed=9 -o out": ("FCFS", "'speed=9'", "drop"),
    "replay --policy edf:token_budget=many -o out": ("token_budget", "'many'", "int"),
    "replay --policy edf:drop=often -o out": ("drop", "'often'", "never, expired, infeasible"),
    "replay --policy no.such:Policy -o out": ("no.such:Policy", "No module named 'no'"),
    "replay --policy slosched.core:SLO -o out": ("slosched.core:SLO", "not a subclass"),
    "replay --latency-model rtx9999 -o out": ("'rtx9999'", "rtx4090/llama-3.1-8b", "slosched fit"),
    "replay --latency-model bad.csv -o out": ("bad.csv", "not a latency model"),
    "replay --latency-model bad.json -o out": ("bad.json", "slosched-latency-model/7"),
    "replay --latency-model negative.json -o out": ("negative.json", "per_token_s", "-1"),
    "replay --latency-model binary.dat -o out": ("binary.dat", "not a latency model"),
    "replay --kv-tokens 0 -o out": ("--kv-tokens",),
    "replay --kv-tokens 8 -o out": ("8 tokens", "--kv-tokens"),
    "replay --kv-tokens 99999999999999999999 -o out": ("--kv-tokens 9999", "at most 1073741824"),
    "replay --host-kv-tokens 99999999999999999999 -o out": ("--host-kv-tokens 9999", "at most"),
    "replay --block-size 0 -o out": ("--block-size",),
    "replay --host-kv-tokens -1 -o out": ("--host-kv-tokens",),
    "replay --max-num-seqs 0 -o out": ("--max-num-seqs",),
    "replay --noise -1 -o out": ("--noise",),
    "replay --noise nan -o out": ("noise",),
    "replay --drift 1 -o out": ("drift", "1.0"),
    "replay --drift -0.2 -o out": ("drift", "-0.2"),
    "replay --tail 1 -o out": ("tail", "1.0"),
    "replay --stall 200ms -o out": ("--stall", "'200ms'", "200ms/10s"),
    "replay --stall 200ms/often -o out": ("--stall", "'often'"),
    "replay --server-time 1ms,2ms,3ms,4ms -o out": ("--server-time", "9ms,0.3ms,1ms"),
    "replay --server-time fast -o out": ("--server-time", "'fast'"),
    "replay --bias 0 -o out": ("bias", "0.0"),
    "replay --deadline-rule later -o out": ("--deadline-rule", "'later'", "mean_tpot"),
    "replay -o bad.csv": ("--out", "bad.csv"),
    "compare -p fcfs -p fifo -o out": ("'fifo'",),
    "compare --records before -o out": ("'before'", "NAME=FILE"),
    "compare --records before=gone -o out": ("gone", "No such file"),
    "compare --records before=records.jsonl -o out": (
        "records.jsonl, line 2",
        "it has no 'arrival_s'",
    ),
    "compare --records before=profile.csv -o out": ("profile.csv, line 1", "it is not JSON"),
    "compare --records fcfs=records.jsonl -o out": ("'fcfs'", "taken"),
    # live
    "top http://127.0.0.1:9 --once": ("http://127.0.0.1:9", "Connection refused", "slosched serve"),
    "replay --url http://127.0.0.1:9/v1 -o out": ("--url", "leave out /v1"),
    "replay --url http://127.0.0.1:9 -p edf -o out": ("--policy is for the simulator",),
    "capacity --url http://127.0.0.1:9/v1/ -o out": ("--url", "leave out /v1"),
    "top http://127.0.0.1:9/v1": ("leave out /v1",),
    "profile --record http://127.0.0.1:9/v1 -o out": ("--record", "leave out /v1"),
    "profile --record http://127.0.0.1:9 -o out": ("no server answers", "Connection refused"),
    "replay --url localhost:8000 -o out": ("'localhost:8000'", "http://"),
    "replay --url http://127.0.0.1:99999 -o out": ("'http://127.0.0.1:99999' is no address",),
    "profile --record http://[::1 -o out": ("'http://[::1' is no address of a server",),
    "top http://": ("'http://' is no address of a server",),
    "replay --url http://127.0.0.1:9 -o out": (
        "no server answers at http://127.0.0.1:9 (Connection refused)",
        "slosched serve",
    ),
    "replay --url http://127.0.0.1:9 --slo-ttft 3x": ("--slo-ttft 3x", "--latency-model"),
    "serve -m tiny-random --latency-model h200/llama-3.1-8b": ("NVIDIA H200", "--force"),
    "serve --emulate trees.json": ("boosting takes", "2 µs", "slosched fit"),
    "serve --emulate rtx9999": ("'rtx9999'", "rtx4090/llama-3.1-8b"),
    "serve --emulate rtx4090/llama-3.1-8b --policy fifo": ("'fifo'",),
    "serve --emulate rtx4090/llama-3.1-8b --slo-ttft 0": ("--slo-ttft", "'0'"),
    "serve --emulate rtx4090/llama-3.1-8b --port 99999": ("99999",),
    "serve --otlp-traces-endpoint foo": ("'foo' is no address of a collector", "http://localhost"),
    "serve --otlp-traces-endpoint http://": ("--otlp-traces-endpoint", "'http://' is no address"),
    "serve --emulate rtx4090/llama-3.1-8b --kv-tokens 3": ("3 tokens",),
    "serve --emulate rtx4090/llama-3.1-8b --host 300.1.1.1": ("300.1.1.1", "--host"),
    # measuring and fitting
    "profile --gpu h200 -o out": ("--gpu", "--from"),
    "profile --sampling top-p -o out": ("--sampling", "--from"),
    "profile --from aiconfigurator -o out": ("--from", "--gpu h100"),
    "profile --from vidur -o out": ("'vidur'", "aiconfigurator"),
    "profile --from aiconfigurator --gpu l40s --backend tgi -o out": ("'tgi'", "vllm"),
    "profile --from aiconfigurator --gpu h1000 -o out": ("'h1000'", "h100", "l40s"),
    "profile --from aiconfigurator --gpu h100 --tp 4 --ep 3 -o out": ("--ep 3", "--tp 4"),
    "profile --from aiconfigurator --gpu l40s -o profile.csv": ("profile.csv", "--overwrite"),
    "profile --from aiconfigurator --gpu l40s --max-context-tokens 131072 -o out": (
        "--max-context-tokens has no effect beside --from",
    ),
    "profile --from aiconfigurator --gpu l40s --no-server -o out": ("--server has no effect",),
    "profile --record http://127.0.0.1:9 --from aiconfigurator --gpu l40s -o out": (
        "--from has no effect beside --record",
    ),
    "profile --record http://127.0.0.1:9 tiny-random -o out": (
        "a model has no effect beside --record",
    ),
    "profile --record http://127.0.0.1:9 --max-num-seqs 8 -o out": ("--max-num-seqs",),
    "profile --from aiconfigurator --gpu l40s . -o out": ("the folder . has no config.json",),
    "fit missing.csv -o out": ("missing.csv", "No such file"),
    "fit profile.csv -o out": ("profile.csv, line 3", "'-3'"),
    "fit bad.csv -o out": ("bad.csv", "slosched profile"),
    "fit few.csv -o out": ("1 different batches are too few", "16"),
    "fit decodes.csv -o out": ("no measured step has a prefill chunk", "profile"),
    "fit few.csv -o few.csv": ("--out few.csv is the profile itself", "another file"),
    "fit few.csv -o x.png --plot ./x.png": ("--plot x.png is written by --out, too",),
    "replay --trace one.csv --perfetto one.csv": ("--perfetto one.csv is the trace itself",),
    "replay -n 5 -o out --perfetto out": ("--perfetto out is written by --out, too",),
    "replay -n 5 -o out --perfetto out/records.jsonl": ("out/records.jsonl is written by --out",),
    "fit few.csv --form cubic -o out": ("'cubic'", "linear", "profiled-joint"),
    "fit few.csv --form roofine -o out": ("'roofine'", "did you mean roofline?"),
    "profile --batches 0 -o out": ("--batches", "greater than or equal to 1"),
    "profile --passes 0 -o out": ("--passes", "greater than or equal to 1"),
    "profile --time-limit 0 -o out": ("--time-limit", "'0'"),
    "profile --load-format half -o out": ("--load-format", "'half'"),
    # the command and its options
    "replay --rate fast": ("'--rate': 'fast' should be a valid number",),
    "replay -n 1.5": ("'-n': '1.5' should be a valid integer",),
    "trace make poisson -n many -o out": ("'-n': 'many' should be a valid integer",),
    "replay --noise -1 -o ./out": ("'--noise': '-1' should be greater than or equal to 0",),
    "replay --deadline-rule late": ("'--deadline-rule': 'late' is not one of 'envelope', 'mean",),
    "simulate": ("'simulate'",),
    "replay --polcy fcfs": ("--polcy", "--policy"),
}


@pytest.mark.parametrize("typed", MISTAKES)
def test_a_mistake_is_named_and_leaves_nothing(cli: Cli, tmp_path: Path, typed: str) -> None:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "binary.dat").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "packed.gz").write_bytes(gzip.compress(AZURE.encode()))
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    said = cli(*typed.split())
    assert said.status in (1, 2)
    for text in MISTAKES[typed]:
        assert text in said.complaint, said.complaint
    assert "Errno" not in said.complaint
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize(
    "typed",
    [
        "replay -o",
        "replay --perfetto",
        "compare -o",
        "capacity -o",
        "plan --gpu h100=2 -o",
        "tune -o",
        "demo -o",
        "profile -o",
        "fit few.csv -o",
        "trace make azure_conv -o",
        "trace fetch azure_conv_2023 -o",
        "serve --admin-api-key k --torch-profiler-dir",
    ],
)
def test_a_place_that_takes_no_file_is_refused_before_any_work(cli: Cli, typed: str) -> None:
    """The system is asked to make something there: root may all, and still not in /proc."""
    said = cli(*typed.split(), "/proc/x/y")
    assert said.status == 2
    assert "'/proc/x/y' cannot be written: /proc takes nothing new (No such file" in said.complaint


def test_a_file_that_may_not_be_changed_is_refused_before_any_work(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, mode: str) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    old = Path("old.csv").absolute()
    old.touch()
    monkeypatch.setattr(Path, "open", refuse)  # root, as whom the tests may run, may open all
    said = cli("profile", "-o", "old.csv").complaint
    assert f"'old.csv' cannot be written: {old} takes nothing new (Permission denied)" in said


def test_a_port_in_use_is_said_to_be(cli: Cli) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        said = cli("serve", "--emulate", "rtx4090/llama-3.1-8b", "--port", port)
    assert said.status == 1
    assert said.complaint == (
        f"error: cannot listen on 127.0.0.1:{port}: Address already in use; "
        "choose another --host or --port"
    )


def test_a_policy_that_schedules_nothing_ends_the_replay(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "idle").mkdir()
    (tmp_path / "idle" / "policy.py").write_text(
        "from slosched.core import Policy, SchedulerOutput\n\n\n"
        "class Idle(Policy):\n"
        "    def schedule(self, view):\n"
        "        return SchedulerOutput()\n"
    )
    said = cli("replay", "-n", "5", "--policy", "idle.policy:Idle", "-o", "out")
    assert said.status == 1
    assert "Idle scheduled nothing although 1 requests are unfinished" in said.complaint
    assert not Path("out").exists()


def test_what_goes_wrong_in_a_policy_of_ones_own_is_told_with_its_line(
    cli: Cli, tmp_path: Path
) -> None:
    lines = [
        "from slosched.policy import FCFS",
        "class Raises(FCFS):",
        "    def schedule(self, view):",
        "        return view.nothing_of_the_kind",
    ]
    (tmp_path / "raises.py").write_text("\n".join(lines))
    (tmp_path / "misspelt.py").write_text("class X(:\n")
    (tmp_path / "divides.py").write_text("\nx = 1 / 0\n")
    plain = ("from slosched import Policy", "class Plain(Policy):", *lines[2:])
    (tmp_path / "plain.py").write_text("\n".join(plain))
    for policy, complaint in (
        ("raises:Raises", "raises.py, line 4, in schedule: AttributeError: 'SchedulerView' object"),
        ("misspelt:X", "cannot import misspelt:X: invalid syntax (misspelt.py, line 1)"),
        ("plain.py:speed=9", "Plain has no option 'speed=9': it has none at all"),
        ("divides:X", "divides.py, line 2, in <module>: ZeroDivisionError: division by zero"),
    ):
        said = cli("replay", "-n", "5", "--policy", policy, "-o", "out")
        assert said.status == 1
        assert complaint in said.complaint
    assert not Path("out").exists()


def test_a_line_of_ones_own_is_found_where_a_worker_process_ran_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "far_away.py").write_text("def fails():\n    raise RuntimeError('out of ideas')\n")
    monkeypatch.syspath_prepend(tmp_path)
    far_away = importlib.import_module("far_away")
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        error = pool.submit(far_away.fails).exception()
    assert error is not None
    place = f"{tmp_path}/far_away.py, line 2, in fails"
    assert what(error) == f"{place}: RuntimeError: out of ideas"


def test_a_fault_of_ours_keeps_its_traceback(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "slosched.cli.like.make_policy", len
    )  # it makes policies that cannot schedule
    with pytest.raises(AttributeError, match="'int' object"):
        cli("replay", "-n", "5")


@pytest.mark.parametrize(
    ("model", "complaint"),
    [
        ("./no-such-folder", "no such model directory: './no-such-folder'"),
        (".", "directory '.' holds no config.json"),
        ("llama.gguf", "'llama.gguf' is no model directory, which has a config.json and weights"),
        (__file__, "single files are not read"),
        ("nobody/nothing", "unknown model 'nobody/nothing'"),
    ],
)
def test_an_unknown_model_is_named(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, model: str, complaint: str
) -> None:
    monkeypatch.setattr(
        "huggingface_hub.constants.HF_HUB_OFFLINE", True
    )  # else it tries for a long time
    for command in (("profile", "-o", "out"), ("serve",)):
        said = cli(*command, "-m", model)
        assert said.status == 1
        assert complaint in said.complaint
    assert not Path("out").exists()


def test_an_unknown_device_or_dtype_is_named(cli: Cli) -> None:
    for option, value in (("--device", "tpu9"), ("--dtype", "float7")):
        said = cli("profile", "-m", "tiny-random", option, value, "-o", "out")
        assert said.status == 1
        assert repr(value) in said.complaint
    assert not Path("out").exists()
