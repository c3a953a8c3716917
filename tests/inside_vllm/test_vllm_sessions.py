"""Sessions inside vLLM: requests whose input goes on after they have answered."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here: run `make test-vllm`")

from real_vllm import Arrival, Loop, Workload, make_config, make_request, make_scheduler
from vllm.v1.request import RequestStatus

from slosched.integrations.vllm import SLOScheduler
from slosched.replay.shadow import read_shadow

NAMES = tuple(f"r{place}" for place in range(4))
GIVEN = Workload(1, (), 64, 8, 16, 4, 256, stop_chance=0.0)


def add_input(scheduler: Any, name: str, turn: int) -> None:
    """Begin a session, or send the next input to one that waits for it."""
    prompt = tuple(range(100 * turn, 100 * turn + 11))
    request = make_request(Arrival(0, name, prompt, max_tokens=3), GIVEN.block_size, time.time())
    request.resumable = True
    scheduler.add_request(request)


@pytest.mark.parametrize("policy", ["fcfs", "slo_aware", "goodput+door"])
@pytest.mark.parametrize(
    ("queue", "is_async"),
    [
        ("fcfs", True),
        ("priority", False),
        ("priority", True),
        ("fcfs", False),
    ],
)
def test_no_session_is_lost_and_none_ends_the_engine(
    queue: str, is_async: bool, policy: str
) -> None:
    """Between two inputs vLLM keeps a session's blocks, and keeps it apart from all who wait."""
    settings = {"policy": policy, "emulate": "h100/llama-3.1-8b"}
    config = make_config(GIVEN, is_async=is_async, settings=settings, policy=queue)
    scheduler = make_scheduler(SLOScheduler, config)
    pool = scheduler.kv_cache_manager.block_pool
    num_free = pool.get_num_free_blocks()
    loop, num_tokens = Loop(scheduler, GIVEN, is_async), dict.fromkeys(NAMES, 0)
    for turn in (1, 2, 3):
        for name in NAMES:
            add_input(scheduler, name, turn)
        while scheduler.has_requests():
            for name, tokens, *_ in loop.step().outputs:
                num_tokens[name] += len(tokens)
            assert loop.num_calls < 300 * turn, "a session never gets its turn"
        waiting = [scheduler.requests[name].status for name in NAMES]
        assert waiting == [RequestStatus.WAITING_FOR_STREAMING_REQ] * len(NAMES)
        assert num_tokens == dict.fromkeys(NAMES, 3 * turn)
    scheduler.finish_requests(NAMES, RequestStatus.FINISHED_ABORTED)
    assert pool.get_num_free_blocks() == num_free


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_shadow_mode_writes_down_each_answer_of_a_session(is_async: bool, tmp_path: Path) -> None:
    """Some next inputs have come before the answer ends, and vLLM goes on with them at once."""
    settings = {"policy": "goodput", "emulate": "h100/llama-3.1-8b", "shadow": str(tmp_path)}
    config = make_config(GIVEN, is_async=is_async, settings=settings)
    scheduler = make_scheduler(SLOScheduler, config)
    loop = Loop(scheduler, GIVEN, is_async)
    for turn in (1, 2, 3):
        for name in NAMES:
            add_input(scheduler, name, turn)
        if turn > 1:
            while scheduler.has_requests():
                loop.step()
    scheduler.finish_requests(NAMES, RequestStatus.FINISHED_ABORTED)
    scheduler.schedule()
    [folder] = tmp_path.iterdir()
    written = read_shadow(folder)
    assert len({r.request_id for r in written.trace.requests}) == len(written.records) == 12
    assert {r.request_id.partition("@")[0] for r in written.records} == set(NAMES)
    assert {r.num_output_tokens for r in written.records} == {3}
    assert not scheduler.truth.fallbacks
