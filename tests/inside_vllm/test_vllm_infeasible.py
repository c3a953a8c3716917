"""Tiers inside vLLM: what becomes of an SLO that cannot be kept, and floors."""

from __future__ import annotations

import time
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here: run `make test-vllm`")

from real_vllm import Arrival, Loop, Workload, make_config, make_request, make_scheduler
from vllm.v1.engine import FinishReason
from vllm.v1.metrics.stats import IterationStats, LoRARequestStates, RequestStateStats
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT

from slosched.integrations.vllm import SLOScheduler

ASKED = {"r0": "reject", "r1": "relegate", "r2": "serve", "r3": None}
"""What each request asks for; the last one leaves it to the settings."""


def ends(settings: dict[str, Any], *, is_async: bool) -> dict[str, tuple[int, Any, Any]]:
    """Return tokens, finish reason and stop reason of requests that are late when they arrive."""
    arrivals = tuple(
        Arrival(
            call=0,
            request_id=name,
            prompt=tuple(range(100 * place, 100 * place + 20)),
            max_tokens=5,
            extra_args=(
                ("slo_ttft_ms", 0.01),
                *([] if asked is None else [("on_infeasible", asked)]),
            ),
        )
        for place, (name, asked) in enumerate(ASKED.items(), start=1)
    )
    given = Workload(1, arrivals, 64, 8, 64, 8, 256, stop_chance=0.0)
    chosen = {"policy": "edf:drop=expired", **settings}
    scheduler = make_scheduler(SLOScheduler, make_config(given, is_async=is_async, settings=chosen))
    steps = Loop(scheduler, given, is_async=is_async, arrival_s=time.time() - 1e-3).run()
    assert not scheduler.truth.divergences
    assert not scheduler.truth.fallbacks
    found = dict.fromkeys(ASKED, (0, None, None))
    for step in steps:
        for name, tokens, finish_reason, stop_reason in step.outputs:
            found[name] = (found[name][0] + len(tokens), finish_reason, stop_reason)
    return found


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("default", ["reject", "relegate", "serve"])
def test_each_request_ends_as_it_or_the_settings_ask(default: str, is_async: bool) -> None:
    rejected = (0, FinishReason.ABORT, "slo_rejected:expired")
    served = (5, FinishReason.LENGTH, None)
    assert ends({"on_infeasible": default}, is_async=is_async) == {
        "r0": rejected,
        "r1": served,
        "r2": served,
        "r3": rejected if default == "reject" else served,
    }


def test_vllms_metrics_know_how_long_a_rejected_request_waited() -> None:
    """They count from the event of its start; without one, from the machine's."""
    given = Workload(1, (), 64, 8, 64, 8, 256, stop_chance=0.0)
    config = make_config(given, settings={"policy": "edf:drop=expired", "slo_ttft_s": 1e-6})
    scheduler = make_scheduler(SLOScheduler, config)
    arrived_s = time.time() - 0.01
    arrival = Arrival(0, "late", (7, 8, 9), max_tokens=5)
    scheduler.add_request(make_request(arrival, given.block_size, arrived_s))
    plan = scheduler.schedule()
    [told] = scheduler.update_from_output(plan, EMPTY_MODEL_RUNNER_OUTPUT).values()
    [end] = told.outputs
    counted, of_request = IterationStats(), RequestStateStats(arrival_time=arrived_s)
    loras = LoRARequestStates(log_stats=True)
    counted.update_from_output(end, told.timestamp, True, of_request, loras, None)
    counted.update_from_finished_request(end.finish_reason, end.request_id, 3, 5, of_request)
    [found] = counted.finished_requests
    assert 0 <= found.queued_time < 60
    assert 0 <= found.prefill_time < 60
    assert 0 <= found.inference_time < 60


@pytest.mark.parametrize("of", ["tier", "tenant"])
@pytest.mark.parametrize("is_async", [False, True])
def test_a_floor_brings_a_request_forward(is_async: bool, of: str) -> None:
    """Behind three long prompts, the tier's request waits for its turn and not for their end."""

    def first_step_of_batch(policy: str) -> int:
        arrivals = [Arrival(0, f"r{i}", tuple(range(i * 500, i * 500 + 200)), 2) for i in range(3)]
        said = ((f"slo_{of}", "batch"),)
        arrivals.append(Arrival(0, "batch", tuple(range(9000, 9020)), 2, extra_args=said))
        given = Workload(1, tuple(arrivals), 128, 8, 32, 8, 256, stop_chance=0.0)
        chosen = {"policy": policy, "slo_tiers": {"batch": {}}}
        config = make_config(given, is_async=is_async, settings=chosen)
        scheduler = make_scheduler(SLOScheduler, config)
        steps = Loop(scheduler, given, is_async=is_async, arrival_s=time.time()).run()
        assert not scheduler.truth.divergences
        assert not scheduler.truth.fallbacks
        return next(i for i, step in enumerate(steps) if "batch" in dict(step.scheduled))

    alone = first_step_of_batch("fcfs")
    assert first_step_of_batch(f"fcfs+floors:{of}s=batch=0.5") < alone / 2


@pytest.mark.parametrize("is_async", [False, True])
def test_who_comes_in_front_by_priority_is_judged_at_once(is_async: bool) -> None:
    """In a queue by priority the latest request does not stand behind all others."""
    settings = {"policy": "fcfs+door", "emulate": "h100/llama-3.1-8b"}
    given = Workload(1, (), 64, 8, 16, 2, 256, stop_chance=0.0)
    config = make_config(given, is_async=is_async, settings=settings, policy="priority")
    scheduler = make_scheduler(SLOScheduler, config)
    loop = Loop(scheduler, given, is_async)

    def add(name: str, priority: int, **extra_args: float) -> None:
        arrival = Arrival(0, name, tuple(range(20)), 40, tuple(extra_args.items()))
        request = make_request(arrival, given.block_size, time.time())
        request.priority = priority
        scheduler.add_request(request)

    for place in range(6):
        add(f"r{place}", 5)
    loop.step()
    assert len(scheduler.waiting) > 2
    add("first", 0, slo_ttft_ms=0.001)
    ended = {
        name: stop_reason
        for _ in range(2)
        for name, _, _, stop_reason in loop.step().outputs
        if stop_reason
    }
    assert list(ended) == ["first"]
    assert ended["first"].startswith("slo_rejected:unkeepable")
    assert not scheduler.truth.fallbacks
