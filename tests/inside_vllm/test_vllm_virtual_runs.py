"""The experiment inside vLLM plays its heats in virtual time, each in a process of its own."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here: run `make test-vllm`")

from experiments.inside_vllm.results import PREDICTIONS, RUNS, SAMPLE, SAMPLE_VIRTUAL, TUNING, Book
from experiments.inside_vllm.setups import TRACES, smoke
from experiments.inside_vllm.shadow_tries import Try, line, rows
from experiments.inside_vllm.virtual_setups import VIRTUAL_SETUPS, with_finalists
from experiments.inside_vllm.virtual_time import VirtualSession

pytestmark = pytest.mark.skipif(not TRACES.exists(), reason=f"{TRACES} is not there")


def test_a_setup_is_tuned_played_and_simulated_and_repeats_exactly(tmp_path: Path) -> None:
    setup = replace(with_finalists(smoke(VIRTUAL_SETUPS["conv-h100"])), rates=(40.0,))
    tables = []
    for name in ("first", "second"):
        session = VirtualSession(Book(tmp_path / name), num_workers=2)
        session.tune(setup)
        session.run(setup)
        session.simulate(setup)
        tables.append(session.book.of(RUNS, setup.name))
    systems = setup.systems(session.book.best_budget(setup.name))
    assert set(tables[0]["system"]) == {system.name for system in systems}
    assert set(session.book.of(TUNING, setup.name)["system"]) == {s.name for s in setup.untuned}
    assert set(tables[0]["clock"]) == {"virtual"}
    assert (tables[0]["attainment"] > 0.5).all()
    own_costs = ["cpu_s", "made"]
    assert tables[0].drop(columns=own_costs).equals(tables[1].drop(columns=own_costs))
    predicted = session.book.read(PREDICTIONS)
    assert len(predicted) == len(systems)


def test_in_real_time_a_part_takes_as_long_as_on_the_device(tmp_path: Path) -> None:
    setup = replace(smoke(VIRTUAL_SETUPS["conv-h100"]), rates=(40.0,), policies=())
    session = VirtualSession(Book(tmp_path), num_workers=2)
    session.tune(setup)
    begin_s = time.monotonic()
    session.sample(setup, 1, slowdown=8.0)
    took_s = time.monotonic() - begin_s
    [warped], [real] = (
        session.book.of(name, setup.name).to_dict("records") for name in (SAMPLE_VIRTUAL, SAMPLE)
    )
    assert (real["clock"], real["slowdown"]) == ("real", 8.0)
    assert (warped["clock"], warped["slowdown"]) == ("virtual", 8.0)
    assert real["num_good"] == warped["num_good"]
    assert real["device_s"] > 0.9 * warped["device_s"]
    assert took_s > 8.0 * real["device_s"], "it is no virtual time that passes"


def test_what_shadow_mode_says_is_compared_with_what_is_gained() -> None:
    [row] = rows((Try(smoke(VIRTUAL_SETUPS["conv-h100"]), 40.0),))
    assert row["num_requests"] == 10
    shares = [float(str(row[name])) for name in ("recorded", "replayed", "said", "live")]
    assert all(0.5 < share <= 1 for share in shares)
    assert abs(shares[2] - shares[3]) <= 0.1
    assert line(row).count("|") == 9
