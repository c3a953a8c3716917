"""Prefill and decode pools, on traces on which every time can be computed by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fleets import make_replicas, make_trace

from slosched.core import EndReason, Request
from slosched.fleet.routers.least_requests import LeastRequests
from slosched.fleet.routers.round_robin import RoundRobin
from slosched.fleet.split import SplitConfig, SplitFleet
from slosched.fleet.transfer import KVTransfer, Transfer
from slosched.fleet.view import ReplicaKind
from slosched.policy import FCFS
from slosched.workload.trace import Trace

AT_ONCE = KVTransfer(bytes_per_token=1)
HALF_A_SECOND = KVTransfer(bytes_per_token=1, bytes_per_s=32)
"""For prompts of 16 tokens."""


def play(
    trace: Trace,
    transfer: KVTransfer = AT_ONCE,
    replicas: list[ReplicaKind] | None = None,
    *,
    num_prefill: int = 1,
    reserved_tokens: int = 32,
) -> list[Request]:
    """Play a trace on a pair of replicas that take a second for each step, or on others."""
    config = SplitConfig(num_prefill, transfer, reserved_tokens=reserved_tokens)
    routers = RoundRobin(), LeastRequests()
    return SplitFleet(trace, FCFS(), replicas or make_replicas(2), routers, config).play()


def test_the_first_token_comes_when_the_kv_has_and_the_others_follow() -> None:
    (request,) = play(make_trace((0.0, 16, 3)), replace(HALF_A_SECOND, latency_s=0.25))
    assert request.token_times_s == [1.75, 2.75, 3.75]
    assert request.started_s == 0.0


def test_a_request_of_one_token_needs_no_transfer() -> None:
    (request,) = play(make_trace((0.0, 16, 1)), HALF_A_SECOND)
    assert (request.end_s, request.end_reason) == (1.0, EndReason.STOP)


def test_a_request_that_arrives_in_the_last_step_of_another_waits_for_its_end() -> None:
    first, second = play(make_trace((0.0, 16, 1), (0.5, 16, 2)))
    assert first.end_s == second.started_s == 1.0
    assert second.token_times_s == [2.0, 3.0]


def test_layers_are_sent_while_the_next_ones_are_computed() -> None:
    trace = make_trace((0.0, 16, 2))
    (request,) = play(trace, replace(HALF_A_SECOND, num_parts=4))
    assert request.token_times_s[0] == 1.125, "a quarter is left to send after the prefill"
    (request,) = play(trace, KVTransfer(bytes_per_token=1, bytes_per_s=8, num_parts=4))
    assert request.token_times_s[0] == 2.0, "the link is slower than the prefill"


def test_a_link_sends_one_prompt_after_the_other() -> None:
    trace = make_trace((0.0, 16, 2), (0.0, 16, 2))
    both = play(trace, HALF_A_SECOND)
    assert [request.token_times_s[0] for request in both] == [1.5, 2.0]
    both = play(trace, HALF_A_SECOND, make_replicas(4), num_prefill=2)
    assert [request.token_times_s[0] for request in both] == [1.5, 1.5], "these have two links"


def test_a_decode_replica_receives_one_prompt_after_the_other() -> None:
    trace = make_trace((0.0, 16, 2), (0.0, 16, 2))
    both = play(trace, HALF_A_SECOND, make_replicas(3), num_prefill=2)
    assert [request.token_times_s[0] for request in both] == [1.5, 2.0]


def test_prefills_do_not_stop_decodes() -> None:
    first, second = play(make_trace((0.0, 16, 5), (2.25, 4000, 1)))
    assert first.token_times_s == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert second.started_s == 3.0, "its KV blocks are reserved between two steps"
    assert second.token_times_s == [5.0], "two steps of 2048 tokens"


def test_a_full_decode_pool_holds_back_prefills() -> None:
    replicas = [*make_replicas(1), *make_replicas(1, kv_tokens=64)]
    first, second = play(make_trace((0.0, 16, 3), (0.0, 16, 3)), AT_ONCE, replicas)
    assert first.end_s == 3.0
    assert second.started_s == 3.0, "16 tokens and twice 32 reserved ones are more than 48"
    first, second = play(
        make_trace((0.0, 16, 3), (0.0, 16, 3)), AT_ONCE, replicas, reserved_tokens=8
    )
    assert (first.started_s, second.started_s) == (0.0, 0.0)


def test_a_decode_replica_has_a_seat_for_each_request_that_is_prefilled() -> None:
    prefill, decode = make_replicas(2)
    limits = replace(decode.config.limits, max_num_seqs=1)
    decode = decode._replace(config=replace(decode.config, limits=limits))
    _, second = play(make_trace((0.0, 16, 3), (0.5, 16, 3)), AT_ONCE, [prefill, decode])
    assert second.started_s == 3.0


def test_a_prefill_replica_keeps_the_kv_until_it_is_sent() -> None:
    replicas = [*make_replicas(1, kv_tokens=48), *make_replicas(1)]
    slow = KVTransfer(bytes_per_token=1, bytes_per_s=8)
    first, second = play(make_trace((0.0, 32, 2), (0.0, 32, 2)), slow, replicas)
    assert first.token_times_s == [5.0, 6.0]
    assert second.started_s == 5.0, "its blocks hold the first prompt until then"


@pytest.mark.parametrize("short_of", ["prefill", "decode"])
def test_what_fits_into_no_replica_of_a_pool_is_rejected(short_of: str) -> None:
    kv_tokens = (48, 4096) if short_of == "prefill" else (4096, 48)
    replicas = [make_replicas(1, kv_tokens=n)[0] for n in kv_tokens]
    first, second = play(make_trace((0.0, 100, 2), (0.0, 16, 2)), HALF_A_SECOND, replicas)
    assert first.end_reason is EndReason.TOO_LONG
    assert second.end_reason is EndReason.STOP


def test_what_fits_into_no_prefill_replica_is_rejected_before_it_waits_for_room() -> None:
    replicas = [*make_replicas(1, kv_tokens=48), *make_replicas(1, kv_tokens=128)]
    trace = make_trace((0.0, 32, 8), (0.5, 100, 2), (0.5, 16, 2))
    _, second, third = play(trace, AT_ONCE, replicas, reserved_tokens=1)
    assert (second.end_reason, second.end_s) == (EndReason.TOO_LONG, 0.5)
    assert third.started_s == 1.0, "it does not wait behind the second"


def test_transfers_are_told_when_they_have_ended() -> None:
    told: list[Transfer] = []
    trace = make_trace((0.0, 16, 2), (0.0, 16, 1))
    routers = RoundRobin(), LeastRequests()
    SplitFleet(
        trace,
        FCFS(),
        make_replicas(2),
        routers,
        SplitConfig(1, HALF_A_SECOND),
        on_transfer=told.append,
    ).play()
    (transfer,) = told
    assert (transfer.prefill, transfer.decode) == (0, 1)
    assert (transfer.prefill_end_s, transfer.end_s) == (1.0, 1.5)


def test_what_cannot_be_simulated_is_refused() -> None:
    trace = make_trace((0.0, 16, 2))
    with pytest.raises(ValueError, match="none is left to decode"):
        play(trace, AT_ONCE, make_replicas(1))
    turns = make_trace((0.0, 16, 2), (5.0, 16, 2)).requests
    session = Trace.of([replace(r, session_id="s") for r in turns], "test").closed_loop(0.05)
    with pytest.raises(ValueError, match="closed loop"):
        play(session)
    one = make_replicas(1)[0]
    overlapped = one._replace(config=replace(one.config, overlap=True))
    with pytest.raises(ValueError, match="overlap"):
        play(trace, AT_ONCE, [one, overlapped])
    impatient = one._replace(config=replace(one.config, client_timeout_s=3.0))
    with pytest.raises(ValueError, match="disconnect"):
        play(trace, AT_ONCE, [one, impatient])


@pytest.mark.parametrize(
    "wrong",
    [{"bytes_per_token": 0}, {"bytes_per_s": -1}, {"latency_s": -0.1}, {"num_parts": 0}],
)
def test_impossible_transfers_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"must be|at least"):
        KVTransfer(**{"bytes_per_token": 1, **wrong})  # type: ignore[arg-type]
