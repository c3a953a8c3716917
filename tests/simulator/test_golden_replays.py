"""The results of a small replay under every policy, which must stay equal to the last bit.

A digest changes only with a decision.  If you meant to change one, print the new digests with
`python tests/simulator/test_golden_replays.py` and say in the commit which decision and why.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from slosched.core import (
    SLO,
    DeadlineRule,
    EndReason,
    Limits,
    PreemptionMode,
    Request,
    ScheduledBatch,
)
from slosched.engine.loop import Engine, StepRecord
from slosched.perfmodel import LinearCoefficients, LinearModel
from slosched.policy.spec import make_policy
from slosched.scheduler import Scheduler
from slosched.simulator.disturbances import Disturbances
from slosched.simulator.simulate import SimulationConfig, simulate
from slosched.workload.trace import Trace, TraceRequest

TICK_S = 2.0**-16
"""All times are multiples of this, so that no machine rounds them."""

MODEL = LinearModel(
    LinearCoefficients(
        per_token_s=TICK_S,
        per_attention_s=TICK_S / 64,
        per_context_s=TICK_S / 32,
        per_tile_s=4 * TICK_S,
        any_decode_s=8 * TICK_S,
        per_swapped_block_s=2 * TICK_S,
        constant_s=256 * TICK_S,
    )
)
ROOMY = SimulationConfig(Limits(max_num_batched_tokens=512, max_num_seqs=48), num_blocks=4096)
TIGHT = SimulationConfig(Limits(max_num_batched_tokens=512, max_num_seqs=48), num_blocks=160)
SWAPPING = SimulationConfig(
    Limits(
        max_num_batched_tokens=256,
        max_num_seqs=24,
        max_num_swapped_blocks=64,
        preemption_mode=PreemptionMode.SWAP,
        deadline_rule=DeadlineRule.ENVELOPE,
    ),
    num_blocks=160,
    num_host_blocks=96,
)
REPLICAS = {"roomy": ROOMY, "tight": TIGHT, "swapping": SWAPPING}

SPECS = ("fcfs", "sarathi", "sarathi:drop=expired", "edf", "sjf:drop=infeasible", "slo_aware")
SPECS += ("vllm_v1:policy=priority,long_prefill_token_threshold=64,watermark=0.05",)
SLOWER = ("qoserve", "fairbatching", "slidebatching", "slai", "slosserve", "jitserve")
SLOWER += ("medha_lars", "vtc", "scorpio", "sola")
SLOWER += (
    "goodput",
    "slosserve:admission=dp",
    "edf+early_rejection",
    "fcfs+past_future",
    "slo_aware+early_rejection+past_future",
)
"""Slower policies, which are replayed on two replicas only."""
GROUPED = (
    *("vllm_v0", "vllm_v0:enable_chunked_prefill=True", "sglang", "vtc:client=priority"),
    *("jitserve:frame_steps=10", "fairbatching", "slidebatching", "slosserve", "slai"),
)
"""More policies that can plan around a group of decodes."""
KEPT = (*product(SPECS, REPLICAS), *product(SLOWER, ("roomy", "swapping")))
GOLDEN = {
    ("goodput", "roomy"): "70a226c59466effd",
    ("goodput", "swapping"): "38ffc4e92af238db",
    ("fcfs", "roomy"): "1b45e1ed9664b742",
    ("fcfs", "tight"): "6bd285259d8ad562",
    ("fcfs", "swapping"): "ff844be1605bcf18",
    (
        "vllm_v1:policy=priority,long_prefill_token_threshold=64,watermark=0.05",
        "roomy",
    ): "bdad53386d1112f9",
    (
        "vllm_v1:policy=priority,long_prefill_token_threshold=64,watermark=0.05",
        "tight",
    ): "b9240f533b2da650",
    (
        "vllm_v1:policy=priority,long_prefill_token_threshold=64,watermark=0.05",
        "swapping",
    ): "d068e13dd5423f7f",
    ("sarathi", "roomy"): "1b45e1ed9664b742",
    ("sarathi", "tight"): "6bd285259d8ad562",
    ("sarathi", "swapping"): "ff844be1605bcf18",
    ("sarathi:drop=expired", "roomy"): "9bb6a002fe359959",
    ("sarathi:drop=expired", "tight"): "8cbde56fc6c5666e",
    ("sarathi:drop=expired", "swapping"): "7e41c7307e3d182b",
    ("edf", "roomy"): "14a2521b33e0b9dd",
    ("edf", "tight"): "6c3839b2c8a95533",
    ("edf", "swapping"): "fb8f071e9b8fd2d4",
    ("sjf:drop=infeasible", "roomy"): "89cbc91713c0dc66",
    ("sjf:drop=infeasible", "tight"): "7b7781a48e837304",
    ("sjf:drop=infeasible", "swapping"): "c86233df75bb7849",
    ("slo_aware", "roomy"): "e1a6ac00705e0596",
    ("slo_aware", "tight"): "ef9e157196253a6c",
    ("slo_aware", "swapping"): "5f80a7fe2a7c6d4c",
    ("qoserve", "roomy"): "ef9a06442278d55c",
    ("qoserve", "swapping"): "0e3fe24bb7bea2c7",
    ("fairbatching", "roomy"): "9e4d279755a6b6f3",
    ("fairbatching", "swapping"): "6c10463f609c8123",
    ("slidebatching", "roomy"): "35b5c329a6624aaf",
    ("slidebatching", "swapping"): "38a605adf0a74ab1",
    ("slai", "roomy"): "6dfd27fd0de7c81c",
    ("slai", "swapping"): "af512dd37e2cfc8f",
    ("slosserve", "roomy"): "7e9ac6924d3cc524",
    ("slosserve", "swapping"): "0add3d389440083e",
    ("slosserve:admission=dp", "roomy"): "3614bff167b12259",
    ("slosserve:admission=dp", "swapping"): "c50789a212bb75bf",
    ("jitserve", "roomy"): "e9e494dfba867849",
    ("jitserve", "swapping"): "427ff146dcb2721b",
    ("medha_lars", "roomy"): "d740533100b5f3eb",
    ("medha_lars", "swapping"): "9908bf06453f0101",
    ("vtc", "roomy"): "df3502f185c6ca01",
    ("vtc", "swapping"): "0c81f2ada1578da9",
    ("scorpio", "roomy"): "784375fbfd77c7f4",
    ("scorpio", "swapping"): "cf909351488d2b10",
    ("sola", "roomy"): "8a33665dda23cbd3",
    ("sola", "swapping"): "15f8603a166ef7f5",
    ("edf+early_rejection", "roomy"): "21a1445fbf2346c2",
    ("edf+early_rejection", "swapping"): "7102726ad61b9f30",
    ("fcfs+past_future", "roomy"): "1b45e1ed9664b742",
    ("fcfs+past_future", "swapping"): "8e380893ceeea8ad",
    ("slo_aware+early_rejection+past_future", "roomy"): "150b14ef1240774f",
    ("slo_aware+early_rejection+past_future", "swapping"): "453bfae35f4e774e",
}


def numbers(seed: int) -> Iterator[int]:
    """Yield numbers of Knuth's MMIX generator, which are the same on every machine."""
    state = seed
    while True:
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        yield state >> 33


def make_trace(num_requests: int = 160, calm: int = 1) -> Trace:
    """Make bursts of prompts of 1 to 700 tokens and outputs of 1 to 160, each with an SLO."""
    draw, requests, arrival_ticks = numbers(seed=1), [], 0
    for i in range(num_requests):
        arrival_ticks += calm * (next(draw) % 2500) * (next(draw) % 2)
        slo = SLO(0.25 + next(draw) % 4, 0.0078125 * (1 + next(draw) % 4))
        prompt, output = 1 + next(draw) % 700, 1 + next(draw) % 160
        requests.append(TraceRequest(f"r{i}", arrival_ticks * TICK_S, prompt, output, slo))
    return Trace.of(requests, "golden")


def digest(requests: list[Request]) -> str:
    """Return a digest of the times of all tokens and of how each request ended."""
    sha = hashlib.sha256()
    for r in requests:
        end = (r.request_id, r.end_reason, r.end_s, r.num_preemptions, r.num_swaps)
        sha.update(repr(end).encode())
        sha.update(struct.pack(f"<{len(r.token_times_s)}d", *r.token_times_s))
    return sha.hexdigest()[:16]


def replay(spec: str, replica: str) -> list[Request]:
    return simulate(make_trace(), make_policy(spec), MODEL, REPLICAS[replica])


def in_turn(specs: Sequence[str], others: Iterable[object]) -> list[Any]:
    """Pair each policy with one of the others in turn; `make test-slow` has the other pairs."""
    others = list(others)
    return [
        pytest.param(spec, other, marks=() if i % len(others) == j else pytest.mark.slow)
        for i, spec in enumerate(specs)
        for j, other in enumerate(others)
    ]


@pytest.mark.parametrize(("spec", "replica"), KEPT)
def test_a_replay_is_what_it_always_was(spec: str, replica: str) -> None:
    requests = replay(spec, replica)
    assert digest(requests) == GOLDEN[spec, replica]


@pytest.mark.parametrize(("spec", "replica"), in_turn(SPECS, REPLICAS))
def test_steps_done_in_one_go_are_those_done_one_by_one(spec: str, replica: str) -> None:
    """A grouped replay equals one with `on_step`, also with disturbances and a learning model."""
    trace = make_trace(100, calm=10)
    disturbances = Disturbances(0.1, 0.2, tail=0.05, stall_s=0.125, stall_every_s=2.0)
    config = replace(REPLICAS[replica], disturbances=disturbances, bias=1.1, online=True, seed=3)
    watched: list[StepRecord] = []
    one_by_one = simulate(trace, make_policy(spec), MODEL, config, on_step=watched.append)
    in_one_go = simulate(trace, make_policy(spec), MODEL, config)
    assert digest(in_one_go) == digest(one_by_one)
    assert len(watched) > 500


@pytest.mark.parametrize(("spec", "timeout_s"), in_turn([*SPECS, *GROUPED], [0.06, 0.25, 1.0]))
def test_clients_that_leave_are_the_same_in_steps_done_in_one_go(
    spec: str, timeout_s: float
) -> None:
    """Waiting requests, prompts and decodes are aborted, in steps with and without others."""
    trace = make_trace(60, calm=8)
    for replica in (ROOMY, replace(TIGHT, num_blocks=200)):
        config = replace(replica, client_timeout_s=timeout_s)
        one_by_one = simulate(trace, make_policy(spec), MODEL, config, on_step=lambda _: None)
        in_one_go = simulate(trace, make_policy(spec), MODEL, config)
        assert digest(in_one_go) == digest(one_by_one)
        left = [r for r in one_by_one if r.end_reason is EndReason.CLIENT]
        assert 0 < len(left) < len(trace)


@pytest.mark.parametrize("spec", GROUPED)
def test_planning_beside_grouped_decodes_changes_nothing(
    spec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The replica's KV blocks run out now and then."""
    schedule_beside, num_beside = Scheduler.schedule_beside, 0

    def counted(self: Scheduler, *args: Any) -> ScheduledBatch | None:
        nonlocal num_beside
        batch = schedule_beside(self, *args)
        num_beside += batch is not None
        return batch

    monkeypatch.setattr(Scheduler, "schedule_beside", counted)
    trace, policy, replica = (
        make_trace(40, calm=16),
        make_policy(spec),
        replace(TIGHT, num_blocks=200),
    )
    one_by_one = simulate(trace, policy, MODEL, replica, on_step=lambda _: None)
    assert not num_beside
    assert digest(simulate(trace, policy, MODEL, replica)) == digest(one_by_one)
    assert num_beside > 10


def test_most_steps_of_a_calm_replay_are_done_in_one_go(monkeypatch: pytest.MonkeyPatch) -> None:
    step, num_steps = Engine.step, 0

    def counted(self: Engine) -> StepRecord:
        nonlocal num_steps
        num_steps += 1
        return step(self)

    monkeypatch.setattr(Engine, "step", counted)
    requests = simulate(make_trace(2), make_policy("sarathi"), MODEL, ROOMY)
    assert num_steps < 0.2 * max(len(r.token_times_s) for r in requests)


def test_the_replays_are_worth_keeping() -> None:
    """The kept replays contain preemptions, swaps and rejections."""
    assert sum(r.num_preemptions for r in replay("sarathi", "tight")) > 10
    assert sum(r.num_swaps for r in replay("fcfs", "swapping")) > 10
    assert len({r.end_reason for r in replay("slo_aware", "swapping")}) >= 3


if __name__ == "__main__":
    for spec, replica in KEPT:
        print(f'    ("{spec}", "{replica}"): "{digest(replay(spec, replica))}",')  # noqa: T201  # a command
