"""Shadow mode changes nothing of what vLLM does, and writes down all of it."""

from __future__ import annotations

import errno
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here: run `make test-vllm`")

from real_vllm import Loop, make_config, make_scheduler, random_workload
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from slosched.core import Policy, SchedulerOutput, SchedulerView
from slosched.integrations.vllm import SLOScheduler
from slosched.integrations.vllm.settings import SettingsError
from slosched.integrations.vllm.shadow import _new_folder
from slosched.replay.shadow import ShadowRun, read_shadow

NUM_WORKLOADS = 15
A_PROFILE = {"profile": "rtx4090/llama-3.1-8b", "any_device": True}


class Raises(Policy):
    """A policy with an error, which no request may feel."""

    num_calls = 0

    def schedule(self, view: SchedulerView) -> SchedulerOutput:
        Raises.num_calls += 1
        if Raises.num_calls > 2:  # the first call is the check at start
            raise RuntimeError("a bug of the policy")
        return SchedulerOutput({})


def run(folder: Path, config: Any, workload: Any, **settings: Any) -> tuple[Any, list[Any]]:
    config.additional_config = {"slosched": {"shadow": str(folder), **settings}}
    scheduler = make_scheduler(SLOScheduler, config)
    is_async = config.scheduler_config.async_scheduling
    return scheduler, Loop(scheduler, workload, is_async, arrival_s=time.time()).run()


def read_only_run(folder: Path) -> ShadowRun:
    [path] = folder.iterdir()
    return read_shadow(path)


@pytest.mark.parametrize("caches_prefixes", [False, True], ids=["plain", "prefix_cache"])
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_vllm_decides_every_step_as_without_slosched(
    is_async: bool, caches_prefixes: bool, tmp_path: Path
) -> None:
    for seed in range(NUM_WORKLOADS):
        workload = random_workload(seed, shares_prefixes=caches_prefixes)
        config = make_config(workload, is_async=is_async, caches_prefixes=caches_prefixes)
        theirs = make_scheduler(AsyncScheduler if is_async else Scheduler, config)
        expected = Loop(theirs, workload, is_async).run()
        folder = tmp_path / str(seed)
        _, found = run(folder, config, workload, policy="goodput", slo_ttft_s=0.001, **A_PROFILE)
        assert found == expected, f"seed {seed}"
        written = read_only_run(folder)
        assert written.server.caches_prefixes is caches_prefixes
        assert written.server.plans_ahead is is_async
        ran = [[n for _, n in step.scheduled] for step in expected if step.scheduled]
        assert [[new for new, _ in m.chunks] for m in written.profile.measurements] == ran
        arrived = {each.request_id: len(each.prompt) for each in workload.arrivals}
        assert {r.request_id: r.num_prompt_tokens for r in written.trace.requests} == arrived
        answers = dict.fromkeys(arrived, 0)
        for step in expected:
            for request_id, tokens, _, _ in step.outputs:
                answers[request_id] += len(tokens)
        assert {r.request_id: r.num_output_tokens for r in written.records} == answers


def test_requests_that_share_a_prefix_share_its_hashes(tmp_path: Path) -> None:
    workload = random_workload(3, shares_prefixes=True)
    config = make_config(workload, caches_prefixes=True)
    run(tmp_path, config, workload, policy="fcfs")
    trace = read_only_run(tmp_path).trace
    assert trace.prefix_block_tokens == workload.block_size
    prompts = {arrival.request_id: arrival.prompt for arrival in workload.arrivals}
    size = workload.block_size
    for one in trace.requests:
        assert len(one.prefix_hashes) == one.num_prompt_tokens // size
        for other in trace.requests:
            for num, pair in enumerate(zip(one.prefix_hashes, other.prefix_hashes, strict=False)):
                left, right = (prompts[r.request_id][: size * (num + 1)] for r in (one, other))
                assert (pair[0] == pair[1]) is (left == right)


def test_a_policy_with_a_profile_says_what_it_would_have_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only in its files: on the page of metrics, an alert took it for requests that are rejected."""
    counted: list[str] = []
    monkeypatch.setattr(
        "slosched.integrations.vllm.link.counter",
        lambda _engine: lambda event, *_: counted.append(event),
    )
    workload = random_workload(2)
    config = make_config(workload)
    scheduler, steps = run(
        tmp_path, config, workload, policy="goodput", slo_ttft_s=1e-6, **A_PROFILE
    )
    rejected = read_only_run(tmp_path).rejected
    assert sum(rejected.values()) == len(workload.arrivals)
    assert dict(scheduler.truth.rejections) == rejected
    ended = [name for step in steps for name, _, finished, _ in step.outputs if finished]
    assert len(ended) == len(workload.arrivals), "all were served"
    assert counted == []


def test_without_a_profile_nothing_is_asked(tmp_path: Path) -> None:
    workload = random_workload(2)
    scheduler, _ = run(tmp_path, make_config(workload), workload, slo_ttft_s=1e-6)
    written = read_only_run(tmp_path)
    assert not written.rejected
    assert len(written.records) == len(workload.arrivals)
    assert not scheduler.truth.fallbacks


def test_an_slo_that_cannot_be_read_and_a_policy_with_an_error_hurt_nobody(tmp_path: Path) -> None:
    workload = random_workload(2)
    first, *others = workload.arrivals
    unread = replace(first, extra_args=(("slo_ttft_ms", -1),))
    workload = replace(workload, arrivals=(unread, *others))
    expected = Loop(make_scheduler(Scheduler, make_config(workload)), workload, False).run()
    scheduler, found = run(
        tmp_path, make_config(workload), workload, policy=f"{__name__}:Raises", **A_PROFILE
    )
    assert found == expected
    assert scheduler.truth.fallbacks
    written = {record.request_id for record in read_only_run(tmp_path).records}
    assert written == {arrival.request_id for arrival in others}


def test_clients_may_name_their_requests_as_vllm_lets_them(tmp_path: Path) -> None:
    """vLLM's ids begin with the header x-request-id; one with a tab ended the engine."""
    workload = random_workload(2)
    first, *others = workload.arrivals
    named = replace(first, request_id="cmpl-a\tà\xa0-0")
    run(tmp_path, make_config(workload), replace(workload, arrivals=(named, *others)))
    written = read_only_run(tmp_path)
    assert len(written.records) == len(written.trace.requests) == len(workload.arrivals)


def test_servers_that_start_in_the_same_second_write_into_folders_of_their_own(
    tmp_path: Path,
) -> None:
    folders = {_new_folder(tmp_path / "shared", engine) for engine in (0, 0, 0, 1, 1)}
    assert len(folders) == 5
    assert all(folder.is_dir() for folder in folders)


def test_settings_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    workload = random_workload(2)
    with pytest.raises(SettingsError, match=r"leave out slosched\.record"):
        run(tmp_path, make_config(workload), workload, record="steps.csv")
    with pytest.raises(ValueError, match="gooput"):
        run(tmp_path, make_config(workload), workload, policy="gooput")
    assert not list(tmp_path.iterdir()), "nothing was begun"


def test_a_full_disk_ends_what_is_written_and_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    workload = random_workload(2)
    monkeypatch.setattr("slosched.replay.shadow.ShadowFiles.note_end", fails)
    monkeypatch.setattr("slosched.replay.shadow.ShadowFiles.note_rejection", fails)
    monkeypatch.setattr("slosched.integrations.vllm.record.append_measurement", fails)
    with caplog.at_level("ERROR", "vllm.slosched"):
        _, steps = run(
            tmp_path,
            make_config(workload),
            workload,
            policy="goodput",
            slo_ttft_s=1e-6,
            **A_PROFILE,
        )
    ended = [name for step in steps for name, _, finished, _ in step.outputs if finished]
    assert len(ended) == len(workload.arrivals), "all were served"
    assert [record.message.partition(",")[2] for record in caplog.records] == [
        " since that failed: [Errno 28] No space left on device"
    ] * 3, "steps, ends and rejections are each told of once"
