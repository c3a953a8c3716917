"""The capacity of a running server: our own, on an emulated device that it is too slow for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from command_line import Said
from factories import make_model
from live_server import live, server_process

from slosched.cli import main
from slosched.core import SLO, DeadlineRule, Limits
from slosched.evaluate.capacity import Plan, Study
from slosched.evaluate.capacity.live import Effort, LiveSearch, ServerGoneError
from slosched.kv import PrefixCaching
from slosched.replay.client import ReplayError
from slosched.workload import Trace, TraceRequest, synthesize

SLOW = make_model(0, 0, 0, 0, 0, 0, constant_s=0.01)
"""A device that takes 10 ms for each step, whatever it holds."""
AMPLE = Effort(time_limit_s=120.0, max_requests=10_000)
FEW = replace(AMPLE, max_requests=20)
"""Enough for one trial of 16 requests, and for the probes around it."""
PLAN = Plan(targets=(0.9,), precision=0.5)


def windows(num_requests: int = 16) -> list[Trace]:
    slo = SLO(ttft_s=0.12, tpot_s=10.0)
    return [
        synthesize("poisson", num_requests=num_requests, seed=s, slo=slo, prompt=4, output=2)
        for s in range(2)
    ]


def search(url: str, effort: Effort = AMPLE, plan: Plan = PLAN) -> LiveSearch:
    return LiveSearch("server", url, windows(), plan, DeadlineRule.MEAN_TPOT, effort)


@pytest.mark.slow
def test_it_brackets_the_rate_that_the_server_keeps() -> None:
    with live(device_model=SLOW, limits=Limits(max_num_seqs=1)) as server:
        found = search(server.url)
        found.run(lambda _done, _left: None)
        assert server.num_held_blocks == 0
    assert found.why_stopped is None
    capacity = Study([found.measured], found.windows).capacity("server", 0.9)
    assert capacity.is_measured, "one at a time, sixteen at once are too many"
    assert 0 < capacity.requests_per_s < 1000
    assert {trial["window"] for trial in found.trials} == {0, 1}
    assert all(trial["num_offered"] == 16 for trial in found.trials)


def test_it_begins_no_trial_beyond_its_limits() -> None:
    with live(device_model=SLOW) as server:
        few = search(server.url, FEW)
        few.run(lambda _done, _left: None)
        short = search(server.url, replace(AMPLE, time_limit_s=1e-3))
        short.run(lambda _done, _left: None)
    assert (len(few.trials), len(short.trials)) == (1, 0)
    assert "20 requests" in str(few.why_stopped)
    assert "time limit of 0.001 s" in str(short.why_stopped)


def test_each_trial_has_prompts_of_its_own() -> None:
    with live(device_model=SLOW) as server:
        found = search(server.url, replace(AMPLE, max_requests=40))
        found.run(lambda _done, _left: None)
    assert found._num_replays == len(found.trials) * 2 + 3, "a probe after each, three at first"


def test_no_prefix_cache_knows_a_prompt_from_an_earlier_search() -> None:
    """The second search of a server sent the prompts of the first."""
    trace = Trace.of([TraceRequest(f"r{i}", i / 10, 40, 2, SLO(5.0, 5.0)) for i in range(16)], "w")
    with live(device_model=SLOW, num_blocks=1000, prefix_cache=PrefixCaching.HASH) as server:
        for _ in range(2):
            LiveSearch("server", server.url, [trace], PLAN, DeadlineRule.MEAN_TPOT, FEW).run(
                lambda _done, _left: None
            )
        served = list(server.worker.records)
    assert len(served) == 2 * (3 + 16 + 1), "three probes at first, and one after the trial"
    assert {record.num_cached_tokens for record in served} == {0}


def test_what_a_replay_cannot_send_is_refused_before_anything_is_sent() -> None:
    """Turns of a closed loop were sent as if they waited for nothing."""
    trace, *_ = windows()
    turns = [replace(trace.requests[0], session_id="s"), trace.requests[1]]
    turns[1] = replace(turns[1], session_id="s", arrival_s=0.0, think_s=1.0)
    several = [replace(r, n=2) for r in trace.requests]
    for requests, why in ((turns, "a closed loop"), (several, "wants 2 answers")):
        window = Trace.of(requests, "window")
        found = LiveSearch("s", "http://127.0.0.1:9", [window], PLAN, DeadlineRule.MEAN_TPOT, AMPLE)
        with pytest.raises(ReplayError, match=why):
            found.run(lambda _done, _left: None)


def test_requests_that_share_prefixes_can_be_sent() -> None:
    """The request by which the server is found to be idle could not be made of such a one."""
    trace, *_ = windows()
    requests = [replace(r, prefix_hashes=(1,)) for r in trace.requests]
    shared = Trace.of(requests, "shared", prefix_block_tokens=4)
    with live(device_model=SLOW) as server:
        found = LiveSearch("server", server.url, [shared], PLAN, DeadlineRule.MEAN_TPOT, FEW)
        found.run(lambda _done, _left: None)
    assert len(found.trials) == 1


def test_a_server_that_is_not_there_or_serves_nobody() -> None:
    with pytest.raises(ReplayError, match="no server answers"):
        search("http://127.0.0.1:9").run(lambda _done, _left: None)
    with (
        live(device_model=SLOW, max_model_len=4) as server,
        pytest.raises(ServerGoneError, match="does not serve a request alone"),
    ):
        search(server.url).run(lambda _done, _left: None)


def test_a_server_that_goes_away_ends_the_search_and_keeps_what_was_measured() -> None:
    program = (
        "import sys; sys.path.insert(0, 'tests')\n"
        "from live_server import live\n"
        "import time\n"
        "with live() as server:\n"
        "    print(server.url, flush=True)\n"
        "    time.sleep(600)\n"
    )
    with server_process(program) as (process, url):
        found = search(url)

        def kill(done: int, _left: int) -> None:
            if done == 1:
                process.kill()
                process.wait()

        found.run(kill)
    assert len(found.trials) == 1
    assert "no server answers" in str(found.why_stopped)


def run_cli(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: str
) -> Said:
    monkeypatch.setattr("sys.argv", ["slosched", *words])
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as end:
        raise SystemExit(main())
    said = capsys.readouterr()
    return Said(int(end.value.code or 0), said.out, said.err)


def write_requests(folder: Path, num_requests: int, lora_id: str = "") -> Path:
    """Write a trace of short requests, ten a second, for the adapter of this name if it has one."""
    path = folder / "requests.csv"
    columns = "request_id,arrival_s,num_prompt_tokens,num_output_tokens,slo_ttft_s,slo_tpot_s"
    rows = [f"r{i},{i / 10},4,2,,,,{lora_id}" for i in range(num_requests)]
    path.write_text("\n".join([f"{columns},slo_e2e_s,lora_id", *rows]) + "\n")
    return path


@pytest.mark.slow
def test_the_command_leaves_the_report(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = write_requests(tmp_path, 24)
    with live(device_model=SLOW) as server:
        words = f"capacity --url {server.url} --trace {path} -n 12 --seeds 2 --precision 0.5"
        words += f" --target 0.9 --slo-ttft 500ms --slo-tpot 5s -o {tmp_path / 'out'}"
        said = run_cli(capsys, monkeypatch, *words.split())
        assert said.status == 0, said.err
        assert "90 % of the requests good" in said.out
        refused = run_cli(capsys, monkeypatch, *words.split(), "-p", "fcfs")
        assert refused.status == 1
        assert "--policy is for the simulator" in refused.err
    trials = pd.read_csv(tmp_path / "out" / "trials.csv")
    assert list(trials.num_offered.unique()) == [12]
    assert (tmp_path / "out" / "report.html").exists()
    assert list(pd.read_csv(tmp_path / "out" / "capacities.csv").policy) == ["server"]


def test_the_command_says_what_went_wrong_with_requests(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It stood in trials.csv alone: a server that fails just seemed to be slow."""
    path = write_requests(tmp_path, 12, lora_id="sql")
    with live(device_model=SLOW) as server:
        words = f"capacity --url {server.url} --trace {path} -n 12 --seeds 1 --max-requests 16"
        words += f" --slo-ttft 5s --slo-tpot 5s -o {tmp_path / 'out'}"
        said = run_cli(capsys, monkeypatch, *words.split())
    assert "stopped early" in said.out
    assert "12 x its LoRA adapter is not there" in said.out
