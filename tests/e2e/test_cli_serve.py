"""`slosched serve` in its own process, and `slosched replay` against it."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from command_line import SLOSCHED, Said, Server, serving
from factories import make_model

from slosched.core import EndReason, RequestStatus
from slosched.perfmodel import LinearModel, load_model, save_model
from slosched.perfmodel.device import cpu_name
from slosched.replay.files import read_records

pytestmark = pytest.mark.e2e

Cli = Callable[..., Said]
GPU = "rtx4090/llama-3.1-8b"
KV_TOKENS = 2048
EMULATED = ("--emulate", GPU, "--policy", "edf:drop=infeasible", "--kv-tokens", str(KV_TOKENS))
LEFT = ("-o", "live", "--no-figures")
"""What a replay leaves here."""


@pytest.fixture(scope="module")
def gpu() -> Iterator[Server]:
    """Yield a server with an emulated GPU that echoes prompts."""
    with serving(*EMULATED, "--slo-ttft", "5s", "--slo-tpot", "200ms") as server:
        yield server


def wait_until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen in time"
        time.sleep(0.02)


def test_it_says_what_it_serves_and_promises(gpu: Server) -> None:
    assert f"serving {GPU} at {gpu.url}" in gpu.announced
    assert "under the policy edf:drop=infeasible" in gpu.announced
    assert "a step has at most 2048 tokens and 256 requests" in " ".join(gpu.announced.split())


def test_health_and_models(gpu: Server) -> None:
    assert gpu.get("/health") == (200, '{"status":"ok"}')
    status, text = gpu.get("/v1/models")
    (model,) = json.loads(text)["data"]
    assert (status, model["id"], model["max_model_len"]) == (200, GPU, KV_TOKENS)


def test_a_completion_whole_and_in_a_stream(gpu: Server) -> None:
    """The emulated model repeats the prompt."""
    status, whole = gpu.post(prompt="abc ", max_tokens=6)
    assert status == 200
    assert whole["choices"][0]["text"] == "abc ab"
    assert whole["choices"][0]["finish_reason"] == "length"
    assert whole["usage"]["total_tokens"] == 10
    *events, usage = gpu.stream(prompt="abc ", max_tokens=6, stream_options={"include_usage": True})
    assert "".join(e["choices"][0]["text"] for e in events) == "abc ab"
    assert [e["choices"][0]["finish_reason"] for e in events] == [None] * 5 + ["length"]
    assert usage["usage"] == whole["usage"]
    assert usage["metrics"]["time_to_first_token_ms"] > 0


def test_its_latency_model_learns_from_the_steps(gpu: Server) -> None:
    gpu.post(prompt="abc ", max_tokens=6)
    text = gpu.get("/metrics")[1]
    (steps,) = re.findall(r'slosched:steps_observed_total\{.*regime="decode"\} (\d+)', text)
    (bias,) = re.findall(r'slosched:latency_model_bias\{.*regime="decode"\} (\S+)', text)
    assert int(steps) >= 5
    assert 0.9 < float(bias) < 2
    assert float(bias) != 1


def test_a_chat(gpu: Server) -> None:
    status, answer = gpu.post(
        "/v1/chat/completions", messages=[{"role": "user", "content": "hi"}], max_tokens=8
    )
    assert (status, answer["choices"][0]["message"]["content"]) == (200, "user: hi")


@pytest.mark.parametrize("where", ["body", "headers"])
@pytest.mark.parametrize("streamed", [False, True])
def test_a_promise_that_cannot_be_kept_is_refused_with_a_429(
    gpu: Server, where: str, streamed: bool
) -> None:
    promise = {"slo_ttft_ms": 1} if where == "body" else {}
    headers = {"x-slo-ttft-ms": "1"} if where == "headers" else {}
    status, answer = gpu.post(
        prompt="x" * 500, max_tokens=4, stream=streamed, headers=headers, **promise
    )
    assert status == 429
    assert answer["error"]["code"] == "slo_infeasible"
    assert answer["error"]["reason"] == "unkeepable"
    assert answer["error"]["expected_ms"] > answer["error"]["promised_ms"]
    assert gpu.post(prompt="x" * 500, max_tokens=4, slo_ttft_ms=5000)[0] == 200


def test_a_quote_tells_what_to_expect_on_the_idle_device(gpu: Server) -> None:
    """The TTFT of an idle device is about the prompt's own prefill."""
    status, text = gpu.get("/v1/quote?prompt_tokens=500")
    ttft_ms = json.loads(text)["ttft_ms"]
    alone_ms = 1000 * load_model(GPU).predict_prefill(500)
    assert status == 200
    assert ttft_ms["p10"] < 1.5 * alone_ms
    assert ttft_ms["p99"] > 0.75 * alone_ms


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        (b"{", "not JSON"),
        (b"[1]", "JSON object"),
        (b'{"prompt": 7}', "prompt must be"),
        (b'{"prompt": ""}', "empty"),
        (b'{"prompt": "a", "max_tokens": -3}', "max_tokens must be an integer >= 1, not -3"),
        (b'{"prompt": "a", "slo_ttft_ms": -5}', "slo_ttft_ms must be a positive, finite number"),
        (b'{"prompt": "a", "slo_tpot_ms": "soon"}', "'soon'"),
        (json.dumps({"prompt": "x" * (KV_TOKENS + 1)}).encode(), f"may have {KV_TOKENS}"),
        (json.dumps({"prompt": "x", "max_tokens": KV_TOKENS}).encode(), f"may have {KV_TOKENS}"),
    ],
)
def test_a_wrong_body_is_a_400_that_says_why(gpu: Server, body: bytes, complaint: str) -> None:
    status, answer = gpu.post_raw(body)
    assert status == 400
    assert complaint in json.loads(answer)["error"]["message"]


def test_another_model_is_a_404(gpu: Server) -> None:
    status, answer = gpu.post(model="gpt-9", prompt="a")
    assert (status, answer["error"]["code"]) == (404, "model_not_found")


def test_a_client_that_leaves_in_mid_stream_costs_nobody_anything(gpu: Server) -> None:
    """The request is aborted and its KV blocks are free again."""
    aborted = gpu.metric("slosched:requests_ended_total", 'reason="client"')
    client = http.client.HTTPConnection(urlsplit(gpu.url).netloc, timeout=10)
    body = json.dumps({"prompt": "abc", "max_tokens": 1000, "stream": True})
    client.request("POST", "/v1/completions", body)
    response = client.getresponse()
    assert response.fp.readline().strip()
    assert response.fp.readline().startswith(b"data: ")
    assert gpu.metric("vllm:num_requests_running") >= 1
    response.close()
    client.close()
    wait_until(
        lambda: gpu.metric("slosched:requests_ended_total", 'reason="client"') == aborted + 1
    )
    wait_until(lambda: gpu.metric("vllm:kv_cache_usage_perc") == 0)
    assert gpu.post(prompt="abc", max_tokens=3)[0] == 200


def test_replay_against_the_server(gpu: Server, cli: Cli) -> None:
    """Every request is served, rejected for its SLO, or too long for the KV cache."""
    rows = [f"{0.1 * i:.1f},{50 + i},{4 + i}" for i in range(10)]
    Path("t.csv").write_text("\n".join(["arrival_s,input_tokens,output_tokens", *rows, "1,3000,5"]))
    said = cli("replay", "--trace", "t.csv", "--url", gpu.url, "--slo-ttft", "5s", *LEFT)
    assert said.status == 0, said.err
    *served, too_long = read_records(Path("live/records.jsonl")).records
    assert [r.num_output_tokens for r in served] == [4 + i for i in range(10)]
    assert all(r.status is RequestStatus.FINISHED for r in served)
    assert (too_long.status, too_long.end_reason) == (RequestStatus.REJECTED, EndReason.TOO_LONG)
    assert all(time_s < 5 for r in served for time_s in [r.ttft_s] if time_s is not None)

    said = cli("replay", "--trace", "t.csv", "--url", gpu.url, "--slo-ttft", "1ms")
    assert said.status == 0, said.err
    good, worst_tenth, rejected = re.findall(r"\d+\.\d%", said.out)
    assert (good, worst_tenth, rejected) == ("0.0%", "0.0%", "100.0%")


@pytest.mark.parametrize("ends_it", [signal.SIGINT, signal.SIGTERM])
def test_a_replay_that_is_stopped_keeps_what_it_has_measured(
    gpu: Server, cli: Cli, ends_it: signal.Signals
) -> None:
    rows = ["0,50,4", "0.1,50,4", "30,50,4"]
    Path("t.csv").write_text("\n".join(["arrival_s,input_tokens,output_tokens", *rows]))
    finished = 'finished_reason="length"'
    num_before = gpu.metric("vllm:request_success_total", finished)

    def interrupt() -> None:
        # Its three warm-up requests, and the two that come at once.
        wait_until(lambda: gpu.metric("vllm:request_success_total", finished) >= num_before + 5)
        time.sleep(0.2)  # until the client has read the last answer
        os.kill(os.getpid(), ends_it)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may ignore it
    try:
        with ThreadPoolExecutor() as pool:
            interrupted = pool.submit(interrupt)
            said = cli("replay", "--trace", "t.csv", "--url", gpu.url, *LEFT)
            interrupted.result()
    finally:
        signal.signal(signal.SIGINT, before)
    assert said.status == 130
    assert "stopped: 2 of 3 requests had ended" in said.out
    assert "2 of 3 requests of t, judged by" in said.out
    assert "no request was promised a time" in said.out
    assert len(read_records(Path("live/records.jsonl")).records) == 2


def told_when_stopped_at(line: str, ends_it: signal.Signals, *options: str, **started: Any) -> str:
    """Start `serve`, stop it once it has printed `line`, and return what it tells."""
    with subprocess.Popen(
        [SLOSCHED, "serve", "--emulate", GPU, *options],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **started,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == f"{line}\n"
        process.send_signal(ends_it)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    return str(said)


def test_sigterm_before_a_server_serves_is_told(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("print('loading', flush=True)\ninput()\n")
    said = told_when_stopped_at("loading", signal.SIGTERM, "-p", "mine.py", cwd=tmp_path)
    assert said.endswith("stopped by Ctrl-C or SIGTERM while it was not serving\n")


@pytest.mark.parametrize("module", ["typer", "numpy"])
@pytest.mark.parametrize("ends_it", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_the_command_line_is_imported_is_told(
    tmp_path: Path, module: str, ends_it: signal.Signals
) -> None:
    (tmp_path / f"{module}.py").write_text("print('importing', flush=True)\ninput()\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    said = told_when_stopped_at("importing", ends_it, env={**os.environ, "PYTHONPATH": path})
    assert said == "stopped by Ctrl-C or SIGTERM before the command had begun\n"


def test_sigterm_before_a_gateway_serves_is_told(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def stopped(*_args: object) -> None:
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr("slosched.gateway.Gateway", stopped)
    assert cli("route", "--url", "http://127.0.0.1:9").status == 130
    assert caplog.messages[-1] == "stopped by Ctrl-C or SIGTERM while it was not serving"


def test_sigterm_lets_running_requests_finish() -> None:
    with serving(*EMULATED) as server, ThreadPoolExecutor() as pool:
        answer = pool.submit(server.stream, prompt="abc", max_tokens=120)
        wait_until(lambda: server.metric("vllm:num_requests_running") == 1)
        server.process.terminate()
        wait_until(lambda: server.get("/health")[0] == 503)
        status, refusal = server.post(prompt="abc", max_tokens=3)
        assert (status, refusal["error"]["code"]) == (503, "not_serving")
        events = answer.result()
        assert len(events) == 120
        assert events[-1]["choices"][0]["finish_reason"] == "length"
        status, rest = server.wait()
        assert status == 0
        assert rest.splitlines()[-1] == "stopped: every request has had its answer"


def test_tiers_and_tenants_have_their_promises_and_floors() -> None:
    tiers = ("--tier", "gold=ttft:5s,tpot:200ms", "--tier", "batch=ttft:1ms,best-effort")
    tenant = ("--tenant", "acme=secret,min-share:0.2")
    headers = {"authorization": "Bearer secret"}
    with serving(*EMULATED, *tiers, *tenant) as server:
        for tier in ("gold", "batch"):
            status, answer = server.post(
                prompt="x" * 500, max_tokens=4, service_tier=tier, headers=headers
            )
            assert (status, answer["service_tier"]) == (200, tier)
        assert server.post(prompt="x", max_tokens=4)[0] == 401
        text = server.get("/metrics")[1]
        assert re.search(r'tier_good_requests_total{.*tier="gold"} 1', text)
        assert re.search(r'tier_requests_relegated_total{.*tier="batch"} 1', text)


def test_the_watchdog_can_be_turned_off() -> None:
    with serving(*EMULATED, "--step-timeout", "off") as server:
        assert server.get("/health")[0] == 200
        assert server.metric("slosched:step_is_hung") == 0


def test_a_step_timeout_that_is_none_is_refused(cli: Cli) -> None:
    said = cli("serve", *EMULATED, "--step-timeout", "soon")
    assert said.status == 2
    assert "--step-timeout" in said.complaint
    assert "'soon' is not a duration" in said.complaint


BUSY_IN_TORCH = """
import torch
from slosched.policy import FCFS

class BusyInTorch(FCFS):
    def schedule(self, view):
        while any(request.num_prompt_tokens > 50 for request in view.waiting):
            torch.zeros(8).add_(1)
        return super().schedule(view)
"""


@pytest.mark.slow
def test_a_thread_that_is_left_behind_in_torch_does_not_abort_the_process(tmp_path: Path) -> None:
    (tmp_path / "busy.py").write_text(BUSY_IN_TORCH)
    options = ("--policy", "busy:BusyInTorch", "--step-timeout", "100ms", "--hang-timeout", "100ms")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    with serving("--emulate", GPU, *options, "--slo-ttft", "1h", env=env) as server:
        assert server.post(prompt="abc", max_tokens=20)[0] == 200  # the first steps have more time
        status, answer = server.post(prompt="abc" * 50, max_tokens=1)
        assert (status, answer["error"]["code"]) == (500, "engine_fault")
        exit_status, said = server.wait()
        assert exit_status == 1, said


@pytest.mark.slow
def test_a_latency_model_of_another_device_serves_if_forced() -> None:
    forced = ("-m", "tiny-random", "--latency-model", GPU, "--force", "--kv-tokens", "1024")
    with serving(*forced) as server:
        assert "profiling" not in server.announced
        assert server.get("/health")[0] == 200


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_server_has_the_type_with_which_its_latency_model_was_measured(
    tmp_path: Path, dtype: str
) -> None:
    facts = {"device": cpu_name(), "dtype": dtype, "threads": "3", "model": "tiny-random"}
    save_model(LinearModel(make_model().coefficients, provenance=facts), tmp_path / "m.json")
    tiny = ("-m", "tiny-random", "--threads", "1", "--attention", "sdpa", "--kv-tokens", "1024")
    with serving(*tiny, "--latency-model", str(tmp_path / "m.json")) as server:
        said = " ".join(server.announced.split())
        assert f"tiny-random on cpu in {dtype}" in said
        assert "warning: the latency model was measured with threads 3 (here 1):" in said


def test_a_real_model_from_its_first_start_to_sigterm(tmp_path: Path, cli: Cli) -> None:
    """All in one test, as starting takes long: the server imports torch and profiles the model."""
    with serving(
        *("-m", "tiny-random", "--threads", "1", "--kv-tokens", "1024", "--max-num-seqs", "8"),
        *("--attention", "sdpa"),  # the empty cache would have the C++ kernel compiled
        *("--slo-ttft", "20s", "--slo-tpot", "2s", "--calibrate", "1s"),
        env={**os.environ, "SLOSCHED_CACHE": str(tmp_path / "cache")},
    ) as server:
        assert "profiling tiny-random" in server.announced
        assert "512 tokens and 8 requests" in " ".join(server.announced.split()), "as for a CPU"
        (model,) = (tmp_path / "cache" / "latency").glob("tiny-random-*.json")
        assert load_model(model).provenance["model"] == "tiny-random", "kept for the next start"
        check_answers_are_the_same_in_a_crowd(server)
        check_what_cannot_be_held_or_kept_is_refused(server)
        said = cli(
            *("replay", "--trace", "azure_conv", "-n", "8", "--rate", "8", "--url", server.url),
            *("--length-scale", "0.05", "--slo-ttft", "20s", "--slo-tpot", "2s"),
            *LEFT,
        )
        assert said.status == 0, said.err
        records = read_records(Path("live/records.jsonl")).records
        assert {r.status for r in records} == {RequestStatus.FINISHED}
        status, rest = server.terminate()
        last = rest.splitlines()[-1]
        assert (status, last) == (0, "stopped: every request has had its answer")


def check_answers_are_the_same_in_a_crowd(server: Server) -> None:
    """Greedy output is the same whole or streamed, alone or in a batch."""
    prompts = [f"The {word} of a step" for word in ("time", "cost", "end", "start", "sum")]
    how = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}

    def streamed(prompt: str) -> str:
        return "".join(e["choices"][0]["text"] for e in server.stream(prompt=prompt, **how))

    alone = [server.post(prompt=prompt, **how)[1] for prompt in prompts]
    assert [a["usage"]["completion_tokens"] for a in alone] == [12] * len(prompts)
    with ThreadPoolExecutor() as pool:
        crowd = list(pool.map(streamed, prompts))
    assert crowd == [a["choices"][0]["text"] for a in alone]
    assert len(set(crowd)) > 1


def check_what_cannot_be_held_or_kept_is_refused(server: Server) -> None:
    status, answer = server.post(prompt="x" * 1100, max_tokens=2)
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    status, answer = server.post(prompt="x" * 900, max_tokens=2, slo_ttft_ms=0.01)
    assert (status, answer["error"]["code"]) == (429, "slo_infeasible")


def test_all_that_it_says_is_json_if_asked_for_that() -> None:
    logging = ("--log-format", "json", "--uvicorn-log-level", "info", "--log-interval", "100ms")
    with serving(*EMULATED, *logging) as server:
        assert server.post(prompt="abc", max_tokens=20)[0] == 200
        status, rest = server.terminate()
    lines = [json.loads(line) for line in (server.announced + rest).splitlines()]
    assert status == 0
    assert {"uvicorn.error", "slosched.requests"} <= {line["logger"] for line in lines}
    assert all(line.keys() >= {"time", "level", "message"} for line in lines)
    [served] = [line for line in lines if line["logger"] == "slosched.requests"]
    assert (served["output_tokens"], served["end_reason"]) == (20, "length")
    assert lines[-1]["message"] == "stopped: every request has had its answer"


def test_the_lines_of_requests_can_be_switched_off() -> None:
    """That they are there by default, the test before this one says."""
    with serving(*EMULATED, "--no-log-requests") as server:
        assert server.post(prompt="abc", max_tokens=2)[0] == 200
        rest = server.terminate()[1]
    assert "POST /v1/completions" not in rest
