"""Priorities and LoRA adapters, drawn for traces that have none."""

from __future__ import annotations

from collections import Counter

import pytest

from slosched.core import SLO, OnInfeasible
from slosched.workload import (
    Adapters,
    Priorities,
    PriorityShare,
    Tiers,
    TraceError,
    parse_adapters,
    parse_priority,
    read_trace,
    synthesize,
    write_trace,
)


def test_a_priority_is_a_share_and_a_number():
    assert parse_priority("0.2:-1") == PriorityShare(0.2, -1)


@pytest.mark.parametrize("text", ["", "0.2", "0.2:x", "0:1", "1.5:1", "nan:1", "-1", "0.2:1.5"])
def test_what_is_no_priority_is_an_error_that_names_it(text):
    with pytest.raises(ValueError, match="SHARE:PRIORITY") as error:
        parse_priority(text)
    assert repr(text) in str(error.value)


def test_shares_get_their_priorities_and_the_rest_has_none():
    mix = Priorities((PriorityShare(0.2, -1), PriorityShare(0.5, 7)), seed=3)
    counts = Counter(mix.assign(20_000))
    assert counts[-1] / 20_000 == pytest.approx(0.2, abs=0.01)
    assert counts[7] / 20_000 == pytest.approx(0.5, abs=0.01)
    assert set(counts) == {-1, 7, 0}
    assert mix.assign(100) == mix.assign(100)
    assert mix.assign(100) != Priorities(mix.shares, seed=4).assign(100)


def test_more_than_all_requests_cannot_be_shared_out():
    with pytest.raises(ValueError, match=r"0\.6:1 0\.6:2 add up to 1\.2"):
        Priorities((PriorityShare(0.6, 1), PriorityShare(0.6, 2)))


def test_adapters_are_asked_for_alike_or_by_a_power_law():
    alike = Counter(Adapters(4, seed=1).assign(20_000))
    assert all(count / 20_000 == pytest.approx(0.25, abs=0.01) for count in alike.values())
    zipf = Counter(parse_adapters("3:1", seed=1).assign(20_000))
    for place, name in enumerate(("lora-1", "lora-2", "lora-3"), start=1):
        assert zipf[name] / 20_000 == pytest.approx((1 / place) / (1 + 1 / 2 + 1 / 3), abs=0.01)
    assert Adapters(4, seed=1).assign(50) == Adapters(4, seed=1).assign(50)


@pytest.mark.parametrize("text", ["", "0", "-3", "2.5", "8:x", "8:-1", "8:inf", "8:nan"])
def test_what_names_no_adapters_is_an_error_that_names_it(text):
    with pytest.raises(ValueError, match="NUM or NUM:SKEW") as error:
        parse_adapters(text)
    assert repr(text) in str(error.value)


def test_one_seed_draws_tiers_priorities_and_adapters_apart():
    """Tiers, priorities and adapters of one seed must not be correlated."""
    tiers = Tiers((SLO(1, 1), SLO(2, 2)), (0.5, 0.5), seed=0).assign([1] * 2000)
    priorities = Priorities((PriorityShare(0.5, 1),), seed=0).assign(2000)
    adapters = Adapters(2, seed=0).assign(2000)
    drawn = Counter(zip(tiers, priorities, adapters, strict=True))
    assert len(drawn) == 8
    assert all(count / 2000 == pytest.approx(1 / 8, abs=0.03) for count in drawn.values())


def test_a_trace_notes_what_was_drawn_and_keeps_it_whatever_is_done_to_it():
    trace = synthesize("poisson", num_requests=300, seed=1)
    assert not {"priorities", "loras"} & set(trace.summary())
    marked = trace.with_priorities(Priorities((PriorityShare(0.3, -2),), seed=5))
    marked = marked.with_adapters(Adapters(4, 1.0, seed=5))
    assert marked.provenance["priorities"] == "0.3:-2"
    assert marked.provenance["loras"] == "4:1"
    assert (marked.summary()["priorities"], marked.summary()["loras"]) == (2, 4)
    changed = marked.scaled_to(9.0).with_lengths_scaled(0.5).clipped(50, 50).trace
    assert [(r.priority, r.lora_id) for r in changed.requests] == [
        (r.priority, r.lora_id) for r in marked.requests
    ]


def test_turns_behind_the_first_of_a_program_are_relegated_unless_they_ask_for_more():
    trace = synthesize("sessions", num_requests=60, seed=2).with_slo(SLO(1.0, 0.05))
    assert {r.on_infeasible for r in trace.requests} == {OnInfeasible.REJECT}
    begun = set()
    for request in trace.with_program_deadlines(60.0).requests:
        is_first = request.session_id not in begun
        begun.add(request.session_id)
        asked = OnInfeasible.REJECT if is_first else OnInfeasible.RELEGATE
        assert request.on_infeasible is asked
    served = trace.with_on_infeasible(OnInfeasible.SERVE).with_program_deadlines(60.0)
    assert {r.on_infeasible for r in served.requests} == {OnInfeasible.SERVE}


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
def test_what_becomes_of_late_requests_is_written_and_read_back(tmp_path, suffix):
    trace = synthesize("sessions", num_requests=30, seed=2).with_program_deadlines(60.0)
    write_trace(trace, tmp_path / f"t.{suffix}")
    assert read_trace(tmp_path / f"t.{suffix}").requests == trace.requests


def test_what_cannot_become_of_a_late_request_is_named_with_its_place(tmp_path):
    lines = "arrival_s,input_tokens,output_tokens,on_infeasible\n0,9,9,relegate\n1,9,9,wait\n"
    (tmp_path / "t.csv").write_text(lines)
    with pytest.raises(
        TraceError, match=r"line 3: on_infeasible is 'wait'; .* reject, relegate, serve"
    ):
        read_trace(tmp_path / "t.csv")
