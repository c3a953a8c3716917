"""Tests of the experiment inside vLLM in virtual time, as far as they need no vLLM."""

from __future__ import annotations

import re
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from experiments.inside_vllm.heats import Row, heats_to_run, heats_to_tune
from experiments.inside_vllm.report_virtual import complete, virtual_parts
from experiments.inside_vllm.results import PREDICTIONS, RUNS, SAMPLE, SAMPLE_VIRTUAL, TUNING, Book
from experiments.inside_vllm.setups import TRACES, Setup, System
from experiments.inside_vllm.virtual_setups import VIRTUAL_SETUPS, with_finalists
from experiments.inside_vllm.virtual_time import NoVllmError, VirtualSession
from slosched.integrations.vllm.settings import read_settings
from slosched.policy.spec import make_policy
from slosched.workload import read_trace

CONV = VIRTUAL_SETUPS["conv-h100"]


def row(setup: Setup, rate: float, part: int, system: System, num_good: int) -> Row:
    return {
        "setup": setup.name,
        "rate": rate,
        "window": part,
        "system": system.name,
        "num_offered": 100,
        "num_good": num_good,
        "num_rejected": 0,
        "attainment": num_good / 100,
        "good_requests_per_s": rate * num_good / 100,
        "ttft_p99_s": 0.2,
        "tpot_p99_s": 0.02,
        "max_num_batched_tokens": system.max_num_batched_tokens,
        "clock": "virtual",
        "slowdown": 1.0,
        "max_lateness_s": 0.0,
        "device_s": 10.0,
        "cpu_s": 0.5,
        "vllm": "0.32.0",
        "machine": "a computer",
        "code_digest": "abc",
        "made": "2026-01-01",
    }


@pytest.mark.parametrize("name", VIRTUAL_SETUPS)
def test_every_system_is_one_that_vllm_and_slosched_can_be_started_with(name: str) -> None:
    setup = with_finalists(VIRTUAL_SETUPS[name])
    systems = (*setup.untuned, *setup.systems(setup.budgets[0]))
    assert len({system.name for system in systems}) == len(systems) - 1, "one budget is twice there"
    assert len(setup.rivals) >= 3
    for system in systems:
        assert system.max_num_batched_tokens >= setup.max_num_seqs
        assert ("--scheduler-cls" in setup.engine_options(system)) is (system.policy is not None)
        settings = read_settings({"slosched": setup.engine_settings(system)})
        assert settings.make_device() is not None
        if system.policy is not None:
            assert settings.policy == system.policy
            make_policy(system.policy)


def test_finalists_play_with_the_limits_that_were_tuned_for_them() -> None:
    budgets = {s.policy: s.max_num_batched_tokens for s in with_finalists(CONV).rivals}
    assert budgets["fcfs:drop=expired"] == 768
    assert budgets["qoserve:alpha_s_per_token=0.001,safety=1.0,drop=infeasible"] == 8192


@pytest.mark.skipif(not TRACES.exists(), reason=f"{TRACES} is not there")
@pytest.mark.parametrize("name", VIRTUAL_SETUPS)
def test_no_part_tunes_vllm_and_measures_it_too(name: str) -> None:
    setup = VIRTUAL_SETUPS[name]
    tuning, played = ({h.window for h in heats(setup)} for heats in (heats_to_tune, heats_to_run))
    assert len(played) == 30
    assert max(played) < min(tuning)
    num_parts = len(read_trace(TRACES / setup.trace)) // setup.num_requests
    assert max(tuning) < num_parts, "beyond that the trace begins again"


def test_only_what_a_system_has_not_played_is_played(tmp_path: Path) -> None:
    session = VirtualSession(Book(tmp_path))
    own, ours = System(512), System(8192, "goodput")
    heats = heats_to_run(CONV, 1)
    assert session.missing(RUNS, heats, [own, ours]) == [(heat, [own, ours]) for heat in heats]
    session.book.keep(RUNS, [row(CONV, heat.rate, 0, own, 50) for heat in heats])
    session.book.keep(RUNS, [row(CONV, heats[0].rate, 0, ours, 50)])
    assert session.missing(RUNS, heats, [own, ours]) == [(heat, [ours]) for heat in heats[1:]]


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed here")
def test_without_vllm_one_is_told_how_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(NoVllmError, match=r"make \.venv-vllm/\.ready"):
        VirtualSession(Book(tmp_path)).tune(CONV, 1)


def test_the_page_shows_only_what_is_complete(tmp_path: Path) -> None:
    book, own = Book(tmp_path / "results"), System(512)
    ours, late = (System(8192, policy) for policy in ("goodput", "sjf:drop=infeasible"))
    for heat in heats_to_run(CONV):
        good = 60 + heat.window
        rows = [row(CONV, heat.rate, heat.window, own, good - 20)]
        rows += [row(CONV, heat.rate, heat.window, ours, good)]
        if heat.window > 0:
            rows += [row(CONV, heat.rate, heat.window, late, good)]
        book.keep(RUNS, rows)
        book.keep(PREDICTIONS, rows)
        if heat.window < 2:
            book.keep(SAMPLE, [r | {"attainment": (good - 1) / 100} for r in rows[1:2]])
            book.keep(SAMPLE_VIRTUAL, rows[1:2])
    book.keep(TUNING, [row(CONV, 20.0, 60, own, 90)])
    shown = complete(book.of(RUNS, CONV.name), CONV)
    assert set(shown["system"]) == {own.name, ours.name}
    assert complete(shown, replace(CONV, num_parts=31)).empty
    runs = book.of(RUNS, CONV.name)
    page = "\n".join(virtual_parts(book, runs.iloc[:0], tmp_path))
    assert "sjf" not in page
    assert re.search(r"\+2\.8 ± \S+ \(1\.37 times as many\): surely more", page)
    assert "The difference is 1.00 points in the mean and 1.0 at most" in page
    assert "8 of 8 mean attainments are within 1 point" in page
    assert "conv-h100 20." in page, "the device's seconds for each second of computing"
    assert (tmp_path / "virtual_time.svg").stat().st_size > 1000
