"""A report on a server in shadow mode: written down, read back, judged."""

from __future__ import annotations

import json
import resource
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from factories import make_model
from typer.testing import CliRunner

from slosched.cli.program import app
from slosched.core import NO_SLO, SLO, DeadlineRule, EndReason, Limits, Request
from slosched.engine.loop import StepRecord
from slosched.evaluate.shadow import NothingToJudgeError, judge
from slosched.metrics import RequestRecord, summarize
from slosched.perfmodel import Measurement, Profile, write_profile
from slosched.perfmodel.measurement import append_measurement
from slosched.policy.spec import PolicySpecError, make_policy
from slosched.replay.shadow import STEPS, ServerFacts, ShadowError, ShadowFiles, read_shadow
from slosched.simulator.simulate import SimulationConfig, simulate
from slosched.workload import Trace, TraceError, TraceRequest
from slosched.workload.request import MAX_PRIORITY, MIN_PRIORITY

MODEL = make_model()
SLO_S = SLO(ttft_s=0.5, tpot_s=0.03)
SERVER = ServerFacts(
    policy="goodput",
    max_num_batched_tokens=2048,
    max_num_seqs=64,
    block_size=16,
    num_blocks=4096,
    caches_prefixes=False,
    plans_ahead=False,
    deadline_rule=DeadlineRule.MEAN_TPOT,
)
CONFIG = SimulationConfig(
    limits=Limits(max_num_batched_tokens=2048, max_num_seqs=64), num_blocks=4096
)


def make_traffic(slo: SLO = SLO_S, num: int = 240) -> Trace:
    """Return bursts that are more than the device can serve in time."""
    requests = [
        TraceRequest(
            request_id=f"r{i}",
            arrival_s=0.9 * (i // 24) + 0.02 * (i % 24),
            num_prompt_tokens=200 + 137 * i % 1500,
            num_output_tokens=20 + 31 * i % 60,
            slo=slo,
        )
        for i in range(num)
    ]
    return Trace.of(requests, "traffic")


def write_run(folder: Path, trace: Trace) -> list[Request]:
    """Let a simulated vLLM serve the trace in shadow mode, and return its requests."""
    files = ShadowFiles(folder, SERVER)
    write_profile(Profile((), {"method": "recorded"}), folder / STEPS)

    def note(step: StepRecord) -> None:
        chunks = tuple((c.num_new_tokens, c.num_prior_tokens) for c in step.batch.chunks)
        append_measurement(Measurement(chunks, step.end_s - step.start_s), folder / STEPS)
        for request in step.ended:
            files.note_end(request)

    return simulate(trace, make_policy("vllm_v1"), MODEL, CONFIG, on_step=note)


def serve(trace: Trace, policy: str) -> list[Request]:
    return simulate(trace, make_policy(policy), MODEL, CONFIG)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shadow") / "run"
    write_run(folder, make_traffic())
    return folder


def test_what_is_written_is_read_back_whatever_the_order_of_ends(tmp_path: Path) -> None:
    trace = make_traffic(num=48)
    requests = write_run(tmp_path / "run", trace)
    run = read_shadow(tmp_path / "run")
    assert run.server == SERVER
    assert run.trace.requests == trace.requests
    by_id = {record.request_id: record for record in run.records}
    assert by_id == {r.request_id: RequestRecord.from_request(r) for r in requests}
    assert sum(new for m in run.profile.measurements for new, _ in m.chunks) > 48 * 200


def test_shared_prefixes_and_rejections_are_kept(tmp_path: Path) -> None:
    files = ShadowFiles(tmp_path, replace(SERVER, caches_prefixes=True))
    write_profile(Profile((Measurement(((16, 0),), 0.01),)), tmp_path / STEPS)
    request = Request("a", 5.0, 40, 8, slo=SLO_S)
    request.end_reason = EndReason.CLIENT
    request.status = EndReason.CLIENT.status
    files.note_end(request, (7, 2**55))
    files.note_rejection("a", EndReason.INFEASIBLE)
    run = read_shadow(tmp_path)
    assert run.trace.prefix_block_tokens == 16
    assert run.trace.requests[0].prefix_hashes == (7, 2**55)
    assert run.trace.requests[0].num_output_tokens == 1, "its true length is not known"
    assert run.rejected == {EndReason.INFEASIBLE: 1}


def test_names_and_priorities_that_no_trace_holds_are_written_so_that_one_does(
    tmp_path: Path,
) -> None:
    """vLLM's ids begin with the header x-request-id, and its priorities may be any number."""
    files = ShadowFiles(tmp_path, SERVER)
    write_profile(Profile((Measurement(((16, 0),), 0.01),)), tmp_path / STEPS)
    for name, priority in (("cmpl-a\tà\xa0", 2**40), ("cmpl-à", -(2**40))):
        request = Request(name, 5.0, 40, 8, priority=priority)
        request.end_reason = EndReason.CLIENT
        request.status = EndReason.CLIENT.status
        files.note_end(request)
    run = read_shadow(tmp_path)
    assert [record.request_id for record in run.records] == [r"'cmpl-a\t\xe0\xa0'", "cmpl-à"]
    assert {r.request_id: r.priority for r in run.trace.requests} == {
        r"'cmpl-a\t\xe0\xa0'": MAX_PRIORITY,
        "cmpl-à": MIN_PRIORITY,
    }


def test_a_disk_that_gets_full_leaves_whole_lines(tmp_path: Path) -> None:
    """The beginning of a line was left, with which no file of the folder could be read."""
    files = ShadowFiles(tmp_path, SERVER)
    write_profile(Profile(()), tmp_path / STEPS)
    step = Measurement(((16, 0), (1, 300)), 0.01)
    request = serve(make_traffic(num=1), "fcfs")[0]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    num_written: Counter[str] = Counter()
    writers: dict[str, Callable[[], None]] = {
        "steps": lambda: append_measurement(step, tmp_path / STEPS),
        "ends": lambda: files.note_end(request, name=f"r{num_written['ends']}"),
        "rejections": lambda: files.note_rejection("r", EndReason.INFEASIBLE),
    }
    try:
        for name, write in writers.items():
            with suppress(OSError):
                while True:
                    write()
                    num_written[name] += 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    run = read_shadow(tmp_path)
    assert len(run.profile.measurements) == num_written["steps"] > 100
    assert len(run.records) == len(run.trace) == num_written["ends"] > 3
    assert run.rejected == {EndReason.INFEASIBLE: num_written["rejections"]}


def test_the_reported_gain_is_the_one_that_the_device_would_have_given(folder: Path) -> None:
    trace = make_traffic()
    good = {
        name: summarize(
            list(map(RequestRecord.from_request, serve(trace, name))), DeadlineRule.MEAN_TPOT
        ).num_good
        for name in ("vllm_v1", "goodput")
    }
    true_gain = good["goodput"] / good["vllm_v1"] - 1
    judged = judge(read_shadow(folder), form="linear")
    assert judged.policy == "goodput"
    assert judged.measured.num_good == good["vllm_v1"]
    assert judged.gain is not None
    assert judged.gain.share == pytest.approx(true_gain, abs=0.05)
    assert judged.gain.interval is not None
    assert true_gain in judged.gain.interval
    assert judged.gain.interval.low > 0.1, "the traffic is an overload, which goodput is made for"


def test_less_load_leaves_less_to_gain(folder: Path) -> None:
    judged = judge(read_shadow(folder), load=0.2, form="linear")
    assert judged.theirs.attainment > 0.95
    assert judged.gain is not None
    assert abs(judged.gain.share) < 0.05


def test_a_wrong_policy_or_load_is_told_before_the_fit(tmp_path: Path) -> None:
    traffic = make_traffic(num=2)
    write_run(tmp_path, Trace.of([replace(r, arrival_s=0.0) for r in traffic.requests], "at once"))
    run = replace(read_shadow(tmp_path), profile=Profile(()))  # no fit can succeed
    with pytest.raises(PolicySpecError, match="no policy 'nope'"):
        judge(run, "nope")
    with pytest.raises(TraceError, match="no rate to change"):
        judge(run, load=2.0)


def test_requests_without_an_slo_get_the_reports_own(tmp_path: Path) -> None:
    write_run(tmp_path, make_traffic(NO_SLO, num=72))
    run = read_shadow(tmp_path)
    with pytest.raises(NothingToJudgeError, match="--slo-ttft"):
        judge(run)
    judged = judge(run, "fcfs", slo=SLO_S, form="linear")
    assert judged.policy == "fcfs"
    assert 0 < judged.measured.num_good < 72


def test_a_folder_of_runs_is_refused_with_their_names(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ShadowError, match="name one of its runs: run"):
        read_shadow(folder.parent)
    with pytest.raises(ShadowError, match="is not the folder"):
        read_shadow(tmp_path)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "Expecting property name"),
        (json.dumps({"policy": "fcfs"}), "it has no 'max_num_batched_tokens'"),
        (json.dumps({**asdict(SERVER), "policy": 7}), "its policy is 7, not a text"),
        (json.dumps({**asdict(SERVER), "block_size": "x"}), "its block_size is 'x', not a whole"),
        (json.dumps({**asdict(SERVER), "num_blocks": 0}), "its num_blocks is 0, not a whole"),
        (json.dumps({**asdict(SERVER), "max_chunk_tokens": 1.5}), "its max_chunk_tokens is 1.5"),
    ],
)
def test_what_is_wrong_with_the_description_of_a_server_is_told(
    tmp_path: Path, text: str, says: str
) -> None:
    (tmp_path / "server.json").write_text(text)
    with pytest.raises(ShadowError, match=f"server.json does not describe a server: {says}"):
        read_shadow(tmp_path)


def test_a_request_that_a_killed_server_wrote_into_one_file_alone_is_left_out(
    tmp_path: Path,
) -> None:
    write_run(tmp_path, make_traffic(num=72))
    whole = read_shadow(tmp_path)
    for name in ("trace.jsonl", "records.jsonl"):
        text = (tmp_path / name).read_text()
        (tmp_path / name).write_text("".join(text.splitlines(keepends=True)[:-1]))
        run = read_shadow(tmp_path)
        assert len(run.trace) == len(run.records) == 71
        assert all(record in whole.records for record in run.records)
        assert judge(run, "fcfs", form="linear").measured.num_offered == 71
        (tmp_path / name).write_text(text)


def test_a_line_that_tells_of_no_rejection_is_named(tmp_path: Path) -> None:
    write_run(tmp_path, make_traffic(num=24))
    for line in ('{"request_id": "r1"}', '{"request_id": "r1", "rea', '"r1"'):
        (tmp_path / "rejected.jsonl").write_text(f"{line}\n")
        with pytest.raises(ShadowError, match=r"rejected\.jsonl, line 1 tells of no rejection"):
            read_shadow(tmp_path)


@pytest.mark.slow
def test_the_command_says_it_in_one_sentence(folder: Path) -> None:
    result = CliRunner().invoke(app, ["shadow", "report", str(folder), "-p", "edf:drop=expired"])
    assert result.exit_code == 0, result.output
    text = " ".join(result.output.split())
    assert "240 requests in" in text
    assert "On your traffic edf:drop=expired would have served" in text
    assert "recorded: vLLM" in text


def test_requests_that_all_come_at_one_time_have_neither_rate_nor_interval(tmp_path: Path) -> None:
    burst = [replace(r, arrival_s=0.0) for r in make_traffic(num=24).requests]
    write_run(tmp_path, Trace.of(burst, "burst"))
    result = CliRunner().invoke(app, ["shadow", "report", str(tmp_path)])
    assert result.exit_code == 0, result.output
    text = " ".join(result.output.split())
    assert "24 requests at one time, " in text
    assert "how sure that is cannot be told" in text
    assert "nan" not in text
    assert "inf/s" not in text
    assert "[" not in text
