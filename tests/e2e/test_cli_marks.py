"""Priorities and LoRA adapters on the command line, and notes on options without effect."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from command_line import Said

from slosched.replay.files import read_records
from slosched.workload import read_trace

pytestmark = pytest.mark.e2e

Cli = Callable[..., Said]

TRACE = ("--trace", "azure_conv", "-n", "60", "--rate", "12", "--max-num-seqs", "8")
POLICIES = ("vllm_v0", "vllm_v0:policy=priority")


def rows(said: Said) -> list[list[str]]:
    """Return the cells of each policy's row, without its name."""
    lines = [line for line in said.out.splitlines() if line.startswith("│ vllm_v0")]
    return [line.strip("│").split("│")[1:] for line in lines]


def test_priority_orders_what_has_priorities_and_says_where_nothing_has(cli: Cli) -> None:
    without = cli("compare", "-p", POLICIES[0], "-p", POLICIES[1], *TRACE, "--no-figures")
    assert without.status == 0
    assert rows(without)[0] == rows(without)[1]
    assert without.out.count("policy=priority has nothing to go by") == 1
    assert "all requests of azure_conv have the same priority" in " ".join(without.out.split())
    marks = ("--priority", "0.2:-1", "--priority", "0.3:4")
    mixed = [cli("replay", "-p", policy, *TRACE, *marks) for policy in POLICIES]
    assert [said.status for said in mixed] == [0, 0]
    assert rows(mixed[0]) != rows(mixed[1])
    assert not any("nothing to go by" in said.out for said in mixed)


def test_a_limit_on_adapters_matters_where_the_trace_has_more(cli: Cli) -> None:
    one = ("replay", "-p", "vllm_v0", *TRACE)
    free = cli(*one)
    limited = cli(*one, "--max-loras", "2")
    assert rows(limited) == rows(free)
    assert "--max-loras 2 changes nothing" in limited.out
    assert rows(cli(*one, "--loras", "8:1", "--max-loras", "2")) != rows(free)


def test_a_sliding_window_makes_room_unless_a_prefix_cache_keeps_the_blocks(cli: Cli) -> None:
    short = ("replay", "-p", "vllm_v0", *TRACE, "--kv-tokens", "6000")
    windowed = (*short, "--sliding-window", "256")
    assert rows(cli(*windowed)) != rows(cli(*short))
    kept, plain = (cli(*one, "--prefix-cache", "hash") for one in (windowed, short))
    assert "--sliding-window changes nothing" in kept.out
    assert rows(kept) == rows(plain)


def test_marks_go_into_trace_files_and_records(cli: Cli, tmp_path) -> None:
    made = cli("trace", "make", *TRACE[1:2], "-n", "60", "--priority", "0.5:-1", "--loras", "3")
    assert "--out" in made.complaint  # is required
    marks = ("--priority", "0.5:-1", "--loras", "3")
    said = cli("trace", "make", "azure_conv", "-n", "60", *marks, "-o", "marked.csv")
    assert "│ priorities " in said.out
    requests = read_trace(tmp_path / "marked.csv").requests
    assert {r.priority for r in requests} == {-1, 0}
    assert {r.lora_id for r in requests} == {"lora-1", "lora-2", "lora-3"}
    policy = ("-p", "vllm_v1:policy=priority")
    cli("replay", "--trace", "marked.csv", *policy, "-o", "run", "--no-figures")
    records = read_records(tmp_path / "run" / "records.jsonl").records
    assert [(r.priority, r.lora_id) for r in records] == [(r.priority, r.lora_id) for r in requests]


def test_swapping_says_what_it_costs_and_a_slower_link_costs_more(cli: Cli) -> None:
    short = ("replay", "-p", "vllm_v0", *TRACE, "--kv-tokens", "6000", "--preemption", "swap")
    assert "there is no host memory to swap to" in cli(*short).out
    swapping = (*short, "--host-kv-tokens", "60000")
    derived = cli(*swapping)
    assert derived.out.count("a swapped block of 16 tokens costs 84.56 µs, derived") == 1
    slow = cli(*swapping, "--swap-bandwidth", "1")
    assert "1 GB/s as asked for" in slow.out
    free = cli(*swapping, "--swap-bandwidth", "inf")
    assert "costs nothing" in free.out
    assert "--swap-bandwidth 25" in free.out
    assert len({str(rows(said)) for said in (derived, slow, free)}) == 3
    assert "swapped block" not in cli("replay", "-p", "vllm_v0", *TRACE).out


@pytest.mark.parametrize(
    ("typed", "complaint"),
    [
        (("--priority", "0.2"), "write SHARE:PRIORITY"),
        (("--priority", "0.7:1", "--priority", "0.7:2"), "add up to 1.4"),
        (("--loras", "none"), "write NUM or NUM:SKEW"),
    ],
)
def test_marks_that_cannot_be_are_refused(cli: Cli, typed: tuple[str, ...], complaint: str) -> None:
    said = cli("trace", "show", "azure_conv", *typed)
    assert said.status == 2
    assert complaint in said.complaint
