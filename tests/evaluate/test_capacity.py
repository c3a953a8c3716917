"""Tests of capacities by simulation: the values, their intervals, and stored results."""

from __future__ import annotations

import importlib
import itertools
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import LifoQueue
from typing import Any

import numpy as np
import pytest
from factories import make_model

from slosched.core import (
    SLO,
    IllegalPlanError,
    OnInfeasible,
    Policy,
    SchedulerOutput,
    SchedulerView,
)
from slosched.evaluate.capacity import (
    Bench,
    CapacityError,
    Contender,
    Flag,
    Outcomes,
    Plan,
    Point,
    Store,
    Study,
    Sweep,
    local_pool,
    window,
)
from slosched.evaluate.capacity.code import (
    _package_modules,
    _statements,
    code_digest,
    replay_modules,
)
from slosched.evaluate.capacity.measured import Measured
from slosched.evaluate.capacity.point import model_digest, trace_digest
from slosched.evaluate.capacity.rates import Lattice
from slosched.evaluate.capacity.windows import blocks_of
from slosched.perfmodel import load_model, scaled
from slosched.policy import POLICIES, WRAPPERS
from slosched.policy.spec import policy_classes
from slosched.simulator.disturbances import Disturbances
from slosched.simulator.simulate import SimulationConfig
from slosched.workload import Trace, TraceError, read_trace, synthesize
from slosched.workload.request import TraceRequest

CONV = Path(__file__).parents[3] / "shared" / "traces" / "azure_conv_2023.csv"
PLAN = Plan(precision=0.02)
AA = Plan(targets=(0.9,), precision=0.03)
QUICK = Plan(targets=(0.9,), precision=0.1)
MODEL = make_model()
CONFIG = SimulationConfig()
PROMISE = SLO(0.2, 0.05)


def poisson(seed: int, n: int = 250, slo: SLO = PROMISE) -> Trace:
    return synthesize("poisson", num_requests=n, seed=seed, slo=slo, prompt=256, output=2)


def contender(policy: str = "sarathi", slower: float = 1.0, name: str | None = None) -> Contender:
    return Contender(name or policy, policy, scaled(MODEL, slower), "test", CONFIG)


def study(
    contenders: list[Contender], windows: list[Trace], plan: Plan = PLAN, seed: int = 0
) -> Study:
    sweep = Sweep(contenders, windows, plan)
    sweep.run(local_pool(1))
    return Study(list(sweep.measured.values()), windows, seed=seed)


class Illegal(Policy):
    """A policy that schedules a request that does not exist."""

    def schedule(self, view: SchedulerView) -> SchedulerOutput:
        return SchedulerOutput({"nobody": 1})


class LastFirst(ThreadPoolExecutor):
    """One thread that begins what came last, as a busy machine may end replays in any order."""

    def __init__(self, max_workers: int, initialize: Callable[[], None]) -> None:
        super().__init__(max_workers, initializer=initialize)
        waiting: Any = LifoQueue()
        self._work_queue = waiting


# Values of capacities


def test_the_capacity_is_where_attainment_crosses_the_target() -> None:
    windows = [poisson(seed) for seed in range(3)]
    found = study([contender()], windows)
    frame = found.frame()
    for target in (0.9, 0.99):
        capacity = found.capacity("sarathi", target)
        assert capacity.is_measured
        assert capacity.interval.low <= capacity.requests_per_s <= capacity.interval.high
        below = frame[frame.rate <= capacity.requests_per_s].iloc[-1]
        above = frame[frame.rate > capacity.requests_per_s].iloc[0]
        assert below.attainment >= target - 0.02
        assert above.attainment <= target + 0.02
        assert above.rate / below.rate < 1.03
    assert (
        found.capacity("sarathi", 0.9).requests_per_s
        > found.capacity("sarathi", 0.99).requests_per_s
    )


def test_a_curve_has_bounds_around_it() -> None:
    frame = study([contender()], [poisson(seed) for seed in range(3)], QUICK).frame()
    assert (frame.attainment_low <= frame.attainment).all()
    assert (frame.attainment <= frame.attainment_high).all()
    assert np.allclose(frame.good_requests_per_s, frame.rate * frame.attainment)
    assert frame.rate.is_monotonic_increasing


def test_one_window_and_one_block_are_enough_for_a_figure() -> None:
    found = study([contender()], [poisson(0, n=40)], QUICK)
    assert found.capacity("sarathi", 0.9).requests_per_s > 0


def test_every_policy_is_played_at_the_shared_rates(tmp_path: Path) -> None:
    contenders, windows = [contender(), contender(slower=2.0, name="slow")], [poisson(0, n=60)]
    plan = replace(QUICK, num_shared_rates=4)
    with Store(tmp_path / "points.sqlite") as store:
        for _ in range(2):  # the second time all outcomes come from the store
            sweep = Sweep(contenders, windows, plan, store)
            sweep.run(local_pool(1))
            frame = Study(list(sweep.measured.values()), windows).frame()
            by_name = {name: set(rows.rate) for name, rows in frame.groupby("policy")}
            both = by_name["sarathi"] & by_name["slow"]
            assert len(both) >= 4
            assert {frame.rate.min(), frame.rate.max()} <= both


# Intervals


def test_a_slower_device_is_told_from_noise() -> None:
    """Detect 3 % and, on the same requests, 1 %."""
    windows = [poisson(seed) for seed in range(5)]
    contenders = [
        contender(name="as it is"),
        contender(slower=1.03, name="3 % slower"),
        contender(slower=1.01, name="1 % slower"),
    ]
    found = study(contenders, windows)
    for target in (0.9, 0.99):
        three = found.ratio("3 % slower", "as it is", target)
        assert three.is_significant
        assert three.value == pytest.approx(1 / 1.03, abs=0.012)
        one = found.ratio("1 % slower", "as it is", target)
        assert three.value < one.value < 1
        assert (one.interval.high - one.interval.low) / 2 < 0.02


@pytest.mark.slow
@pytest.mark.skipif(not CONV.exists(), reason="needs ../shared/traces/azure_conv_2023.csv")
def test_one_percent_of_a_real_traces_capacity_is_told_from_noise(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Play 18,000 of Azure's conversations at each rate, which takes minutes."""
    model = load_model("h100/llama-3.1-8b")
    config = replace(CONFIG, num_blocks=432_992 // 16)
    trace = read_trace(CONV).with_slo(SLO(1.0, 0.05))
    windows = [window(trace, 3000, seed) for seed in range(6)]
    contenders = [
        Contender(f"x {slower}", "sarathi", scaled(model, slower), "h100", config)
        for slower in (1.0, 1.01, 1.03)
    ]
    sweep = Sweep(contenders, windows)
    sweep.run(local_pool())
    found = Study(list(sweep.measured.values()), windows)
    for target in (0.9, 0.99):
        one, three = (found.ratio(name, "x 1.0", target) for name in ("x 1.01", "x 1.03"))
        with capsys.disabled():
            sys.stdout.write(f"\nat {target}: 1 % slower {one}, 3 % slower {three}\n")
        assert three.is_significant
        assert three.value < 1
        assert (one.interval.high - one.interval.low) / 2 < 0.01


def test_a_policy_is_not_better_than_itself() -> None:
    """Compare the same policy on other arrivals and seeds (A/A), each pair of four studies."""
    studies = [
        study([contender()], [poisson(seed) for seed in range(first, first + 4)], AA, seed=first)
        for first in range(0, 16, 4)
    ]
    ratios = [
        a.ratio_to(b, "sarathi", "sarathi", 0.9) for a, b in itertools.combinations(studies, 2)
    ]
    assert [r for r in ratios if r.is_significant] == []
    # The test can fail: the same comparison finds a device that is a quarter slower.
    slow = study([contender(slower=1.33)], [poisson(seed) for seed in range(30, 34)], AA, seed=30)
    assert sum(slow.ratio_to(s, "sarathi", "sarathi", 0.9).is_significant for s in studies) == 4


def test_a_policy_is_not_better_than_itself_on_a_noisy_device() -> None:
    """Compare the same policy on the same arrivals with new device noise (A/A, paired)."""
    noisy = replace(CONFIG, disturbances=Disturbances(noise=0.1))
    again = [
        replace(contender(name=f"run {i}"), config=replace(noisy, seed=100 * i)) for i in range(3)
    ]
    found = study(again, [poisson(seed) for seed in range(3)], AA)
    for a, b in itertools.combinations(found.contenders, 2):
        assert not found.ratio(a, b, 0.9).is_significant, (a, b)
    assert found.ratio("run 0", "run 0", 0.9).interval == (1.0, 1.0)


def test_no_ratio_is_below_zero_however_much_two_windows_differ() -> None:
    windows = [
        synthesize("poisson", num_requests=60, seed=seed, slo=PROMISE, prompt=256, output=output)
        for seed, output in enumerate((2, 200))
    ]
    found = study([contender("sarathi"), contender("fcfs")], windows, QUICK)
    both = found.frame().groupby("rate").filter(lambda rows: len(rows) == 2)["rate"].unique()
    ratios = [found.goodput_ratio("fcfs", "sarathi", rate) for rate in both]
    ratios.append(found.ratio("fcfs", "sarathi", 0.9))
    assert {ratio.interval.low for ratio in ratios} == {0.0}


def test_goodput_at_a_rate_is_compared_on_the_same_requests() -> None:
    """Compare beyond the knee of a policy that drops, on a device and on a slower one."""
    dropping = [contender("sjf:drop=infeasible", slower, f"{slower}") for slower in (1.0, 1.1)]
    windows = [poisson(seed) for seed in range(3)]
    sweep = Sweep(dropping, windows, Plan(precision=0.001, at_rate=120.0))
    sweep.run(local_pool(1))
    found = Study(list(sweep.measured.values()), windows)
    (rate,) = set(found.frame()["rate"])
    ratio = found.goodput_ratio("1.1", "1.0", rate)
    shares = found.frame().set_index("policy")["attainment"]
    assert ratio.value == pytest.approx(shares["1.1"] / shares["1.0"])
    assert 0.4 < ratio.value < 0.95
    assert ratio.value in ratio.interval
    assert ratio.is_significant
    assert found.goodput_ratio("1.0", "1.0", rate).interval == (1.0, 1.0)


def test_a_ratio_to_one_good_request_has_no_upper_end() -> None:
    """A third of the replicates have no good request of the reference, and some have none at all."""
    trace = poisson(0, n=40)
    rows = Bench.of([trace], [MODEL]).run(point(trace)).requests.copy()
    measured = []
    for name, good in (("ours", (30, 31, 38)), ("reference", (38,))):
        rows["good"] = False
        rows["good"][list(good)] = True
        outcomes = {0: {0: Outcomes(rows.copy())}}  # at the rate of 1, which is place 0
        measured.append(Measured(name, Plan(), Lattice.between(1.0, 2.0, 0.1), 0, 1, outcomes))
    ratio = Study(measured, [trace]).goodput_ratio("ours", "reference", 1.0)
    assert ratio.value == 3
    assert ratio.interval.low == 1
    assert ratio.interval.high == math.inf


def test_requests_that_are_not_judged_change_no_capacity() -> None:
    """Let one request in four have a promise that nothing can keep, as part of the same load."""
    windows = [poisson(seed) for seed in range(2)]
    impossible = SLO(PROMISE.ttft_s, 1e-6)
    poisoned = [
        Trace.of(
            [replace(r, slo=impossible if i % 4 == 0 else r.slo) for i, r in enumerate(w.requests)],
            w.name,
        )
        for w in windows
    ]
    judged = [np.arange(len(w)) % 4 != 0 for w in windows]
    shares = []
    for played in (windows, poisoned):
        sweep = Sweep([contender()], played, QUICK, judged=judged)
        sweep.run(local_pool(1))
        found = Study(list(sweep.measured.values()), played, judged=judged)
        assert found.capacity("sarathi", 0.9).requests_per_s > 0
        shares.append(found.frame())
    assert shares[0].equals(shares[1])
    assert study([contender()], poisoned, QUICK).capacity("sarathi", 0.9).requests_per_s == 0


# Stored results


def point(trace: Trace, rate: float = 20.0) -> Point:
    return Point("slo_aware", model_digest(MODEL), trace_digest(trace), rate, CONFIG)


def test_a_key_is_all_that_a_replay_depends_on() -> None:
    base = point(poisson(0))
    assert base.key == replace(base, policy="slo_aware:").key
    others = [
        replace(base, policy="slo_aware:margin=0.5"),
        replace(base, policy="edf"),
        replace(base, model=model_digest(scaled(MODEL, 1.01))),
        replace(base, trace=trace_digest(poisson(1))),
        replace(base, trace=trace_digest(poisson(0, slo=SLO(0.2, 0.06)))),
        replace(base, rate=20.1),
        replace(base, config=replace(CONFIG, disturbances=Disturbances(noise=0.1))),
        replace(base, config=replace(CONFIG, seed=1)),
        replace(base, config=replace(CONFIG, limits=replace(CONFIG.limits, max_num_seqs=99))),
    ]
    assert len({p.key for p in [base, *others]}) == 1 + len(others)
    renamed = Trace(poisson(0).requests, "another name", {"from": "elsewhere"})
    assert trace_digest(renamed) == base.trace


def test_what_is_said_of_requests_is_in_the_key_and_traces_without_keep_theirs() -> None:
    first = TraceRequest("a", 0.0, 10, 3, SLO(1.0, 0.05), (1, 2), "s")
    trace = Trace.of([first, TraceRequest("b", 0.5, 20, 4)], "t", prefix_block_tokens=16)
    # The digest of versions without priorities and adapters, whose stored results stay valid.
    assert trace_digest(trace) == (
        "0e8787d5fc2df09845614fc35a134a40031757f110c22b09ec0efb10a86eac89"
    )
    marked = [
        replace(first, priority=1),
        replace(first, priority=2),
        replace(first, lora_id="x"),
        replace(first, on_infeasible=OnInfeasible.SERVE),
    ]
    digests = [
        trace_digest(Trace.of([one, trace.requests[1]], "t", prefix_block_tokens=16))
        for one in marked
    ]
    assert len({trace_digest(trace), *digests}) == 5
    assert trace_digest(replace(trace, prefix_block_tokens=512)) != trace_digest(trace)


_IN_ANOTHER_PROCESS = """
import json
from test_capacity import MODEL, Bench, point, poisson
outcomes = Bench.of([poisson(3)], [MODEL]).run(point(poisson(3)))
print(json.dumps([point(poisson(3)).key, outcomes.digest]))
"""


def test_the_same_seed_gives_the_same_bytes_in_any_process() -> None:
    here = Bench.of([poisson(3)], [MODEL]).run(point(poisson(3)))
    paths = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]
    ran = subprocess.run(
        [sys.executable, "-c", _IN_ANOTHER_PROCESS],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": os.pathsep.join(paths)},
    )
    assert json.loads(ran.stdout) == [point(poisson(3)).key, here.digest]


def test_outcomes_come_out_of_the_file_as_they_went_in(tmp_path: Path) -> None:
    outcomes = Bench.of([poisson(0)], [MODEL]).run(point(poisson(0)))
    with Store(tmp_path / "deep" / "points.sqlite") as store:
        assert store.get(point(poisson(0))) is None
        store.put(point(poisson(0)), outcomes, {"trace": "poisson", "model": "test"})
    with Store(tmp_path / "deep" / "points.sqlite") as store:
        kept = store.get(point(poisson(0)))
        assert kept is not None
        assert kept.digest == outcomes.digest
        assert store.get(point(poisson(0), rate=21.0)) is None
        (row,) = store.frame().to_dict("records")
    assert row["attainment"] == outcomes.attainment
    assert row["policy_repr"].startswith("SLOAware(")
    assert row["git_hash"]


_LATEST_FIRST = """
from slosched.policy import EDF

class Mine(EDF):
    def prefill_order(self, view):
        return lambda request: -request.arrival_s
"""


def test_results_of_other_code_are_not_reused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Play a policy, edit its file, play it again, and undo the edit."""
    monkeypatch.syspath_prepend(tmp_path)
    mine = replace(point(poisson(0)), policy="edited_policy:Mine")

    def write(code: str) -> None:
        (tmp_path / "edited_policy.py").write_text(code)
        sys.modules.pop("edited_policy", None)
        importlib.invalidate_caches()

    with Store(tmp_path / "points.sqlite") as store:
        for code in (_LATEST_FIRST, _LATEST_FIRST.replace("-request", "request")):
            write(code)
            assert store.get(mine) is None
            outcomes = Bench.of([poisson(0)], [MODEL]).run(mine)
            store.put(mine, outcomes, {"trace": "poisson", "model": "test"})
            assert store.get(mine) is not None
        assert len(store.frame()) == 2
        write(_LATEST_FIRST + "# The order is that of a stack.\n")
        assert store.get(mine) is not None


_LOADED = """
import sys
from slosched.simulator import simulate
print(*(n for n in sys.modules if n.startswith("slosched.")))
"""


def test_the_code_of_a_result_is_all_that_a_replay_loads() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", _LOADED], capture_output=True, text=True, check=True
    )
    loaded = set(ran.stdout.split())
    assert "slosched.scheduler.scheduler" in loaded
    # Not counted: traces are in a point's key, and packages only hand out names.
    packages = {name.rpartition(".")[0] for name in _package_modules()}
    assert not {
        name
        for name in loaded - replay_modules((*POLICIES.values(), *WRAPPERS.values())) - packages
        if not name.startswith(("slosched.workload.", "slosched.spelling"))
    }


def test_a_result_stays_valid_where_only_words_and_places_change() -> None:
    told = _statements(
        '''"""A module."""
from a.b import c
if TYPE_CHECKING:
    from d import e
__all__ = ["f"]
@dataclass
class F:
    """What it is."""
    x: int = 1
    """What x is."""
    def f(self):
        """Do it."""
        from g import h
        return h(self.x)  # why
'''
    )
    assert told == _statements(
        "@dataclass\nclass F:\n    x: int = 1\n    def f(self):\n        return h(self.x)\n"
    )
    assert told != _statements(
        "@dataclass\nclass F:\n    x: int = 2\n    def f(self):\n        return h(self.x)\n"
    )


def test_another_policy_is_other_code() -> None:
    digests = {code_digest(s) for s in ("fcfs", "edf", "edf+early_rejection", "sarathi")}
    assert len(digests) == 4


def test_a_policys_code_is_its_own_and_that_of_its_parts() -> None:
    ours = replay_modules(policy_classes("goodput"))
    assert {"slosched.policy.goodput.policy", "slosched.policy.kit.punctual"} <= ours
    assert not any("sglang" in module for module in ours)
    wrapped = replay_modules(policy_classes("edf+early_rejection"))
    assert {"slosched.policy.edf", "slosched.policy.published.early_rejection"} <= wrapped
    assert "slosched.policy.goodput.policy" not in wrapped


def test_a_policy_that_imports_from_the_top_depends_on_what_it_takes_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "from slosched import DecodeFirst\n\n\nclass Mine(DecodeFirst):\n    pass\n"
    (tmp_path / "mine_from_the_top.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    modules = replay_modules(policy_classes("mine_from_the_top:Mine"))
    edf = replay_modules(policy_classes("edf"))
    assert modules - edf == {"mine_from_the_top"}


def test_an_interrupted_sweep_goes_on_where_it_was(tmp_path: Path) -> None:
    windows = [poisson(seed) for seed in range(2)]
    straight = study([contender()], windows, QUICK)

    def interrupt(done: int, expected: int) -> None:
        assert expected >= done
        if done == 5:
            raise KeyboardInterrupt

    with Store(tmp_path / "points.sqlite") as store:
        with pytest.raises(KeyboardInterrupt):
            Sweep([contender()], windows, QUICK, store).run(local_pool(1), interrupt)
        made = list(store.frame().made)
        assert len(made) == 5
        seen: list[int] = []
        sweep = Sweep([contender()], windows, QUICK, store)
        sweep.run(local_pool(1), lambda done, _: seen.append(done))
        assert seen[0] > 5
        assert len(store.frame()) == seen[-1]
    resumed = Study(list(sweep.measured.values()), windows)
    assert resumed.frame().equals(straight.frame())


@pytest.mark.parametrize("seed", range(3))
def test_it_does_not_matter_which_of_the_replays_under_way_end_first(seed: int) -> None:
    windows = [poisson(seed + i, n=80) for i in range(3)]
    here = study([contender()], windows)
    sweep = Sweep([contender()], windows, PLAN)
    sweep.run(partial(LastFirst, 1))
    assert Study(list(sweep.measured.values()), windows).frame().equals(here.frame())


@pytest.mark.parametrize("num_before", [4, 10, 14])
def test_a_sweep_that_stopped_within_a_round_finds_the_same(
    tmp_path: Path, num_before: int
) -> None:
    windows = [poisson(2 + i, n=80) for i in range(3)]
    straight = study([contender()], windows)

    def interrupt(_done: int, _expected: int) -> None:
        raise KeyboardInterrupt

    with Store(tmp_path / "points.sqlite") as store:
        for _ in range(num_before):
            with pytest.raises(KeyboardInterrupt):
                Sweep([contender()], windows, PLAN, store).run(local_pool(1), interrupt)
        sweep = Sweep([contender()], windows, PLAN, store)
        sweep.run(local_pool(1))
    assert Study(list(sweep.measured.values()), windows).frame().equals(straight.frame())


@pytest.mark.slow
def test_a_pool_of_processes_finds_the_same(tmp_path: Path) -> None:
    windows = [poisson(seed) for seed in range(2)]
    here = study([contender()], windows, QUICK)
    sweep = Sweep([contender()], windows, QUICK)
    sweep.run(local_pool(2))
    assert Study(list(sweep.measured.values()), windows).frame().equals(here.frame())


def test_a_file_that_is_no_store_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "points.sqlite"
    path.write_text("this is a letter, not a database, and it is long enough to be read as one")
    with pytest.raises(CapacityError, match=r"points\.sqlite is not a store"):
        Store(path)
    assert path.read_text().startswith("this is a letter")


# Failures and flags


def test_a_promise_that_nobody_can_keep_is_a_capacity_of_zero() -> None:
    windows = [poisson(seed, slo=SLO(0.001, 0.05)) for seed in range(2)]
    found = study([contender()], windows, QUICK).capacity("sarathi", 0.9)
    assert found.flags == {Flag.UNREACHABLE}
    assert (found.requests_per_s, found.best_attainment) == (0.0, 0.0)


def test_a_promise_that_cannot_be_broken_never_saturates() -> None:
    windows = [poisson(seed, n=60, slo=SLO(1e6, 1e6)) for seed in range(2)]
    capacities = study([contender(), contender("edf")], windows, QUICK)
    found = capacities.capacity("sarathi", 0.9)
    assert Flag.NEVER_SATURATES in found.flags
    assert found.requests_per_s > 100
    assert found.interval.high == float("inf")
    assert np.isnan(capacities.ratio("edf", "sarathi", 0.9).value)


def test_a_highest_rate_that_hardly_keeps_the_device_busy_is_searched() -> None:
    found = study([contender()], [poisson(0)], replace(QUICK, max_rate=0.01))
    assert found.capacity("sarathi", 0.9).flags >= {Flag.NEVER_SATURATES}
    assert found.frame()["rate"].max() == pytest.approx(0.01, rel=0.1)


def test_a_queue_that_grows_is_flagged() -> None:
    """Go beyond the device's throughput without rejection, so that waits grow with the trace."""
    windows = [poisson(seed, slo=SLO(30.0, 0.5)) for seed in range(3)]
    found = study([contender()], windows, QUICK)
    assert Flag.QUEUE_GROWS in found.capacity("sarathi", 0.9).flags
    light = replace(QUICK, max_rate=40.0)
    frame = study([contender()], [poisson(seed) for seed in range(3)], light).frame()
    assert not frame.queue_grows.any()


def test_a_trace_that_is_too_short_to_warm_up_is_flagged() -> None:
    long_answers = [
        synthesize("poisson", num_requests=60, seed=s, slo=SLO(1, 0.1), prompt=64, output=300)
        for s in range(2)
    ]
    found = study([contender()], long_answers, QUICK).capacity("sarathi", 0.9)
    assert Flag.SHORT in found.flags


def test_a_policy_that_fails_does_not_stop_the_others() -> None:
    windows = [poisson(0)]
    sweep = Sweep([contender(f"{__name__}:Illegal", name="bad"), contender()], windows, QUICK)
    sweep.run(local_pool(1))
    assert isinstance(sweep.measured["bad"].error, IllegalPlanError)
    found = Study(list(sweep.measured.values()), windows)
    assert found.contenders == ["sarathi"]
    assert found.capacity("sarathi", 0.9).requests_per_s > 0


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ({"targets": (1.0,)}, "1.0"),
        ({"targets": ()}, "at least one"),
        ({"max_rate": 0.0}, "max_rate must be a positive number of requests/s, not 0.0"),
        ({"at_rate": -1.0}, "at_rate must be .* not -1.0"),
    ],
)
def test_a_plan_that_looks_for_nothing_is_refused(plan: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Plan(**plan)


def test_names_must_differ() -> None:
    with pytest.raises(ValueError, match="same name"):
        Sweep([contender(), contender()], [poisson(0)])


# Windows, blocks, warm-up


def test_windows_share_no_request_until_the_trace_is_read_once() -> None:
    trace = poisson(0, n=90)
    cut = [window(trace, 30, seed) for seed in range(4)]
    ids = [[r.request_id for r in w.requests] for w in cut]
    assert sorted(itertools.chain(*ids[:3])) == sorted(r.request_id for r in trace.requests)
    assert ids[3] == ids[0]
    around = window(trace, 40, 2)
    assert [r.request_id for r in around.requests] == [str(i % 90) for i in range(80, 120)]
    assert (np.diff(around.arrivals_s) >= 0).all()
    with pytest.raises(TraceError, match="90 requests, a window of 91"):
        window(trace, 91, 0)


def test_a_window_keeps_what_its_prefix_hashes_stand_for() -> None:
    lines = [
        TraceRequest(str(i), float(i), 32, 1, SLO(1, 0.1), prefix_hashes=(i,)) for i in range(4)
    ]
    cut = window(Trace.of(lines, "shared", prefix_block_tokens=16), 2, 1)
    assert cut.prefix_block_tokens == 16
    assert [r.prefix_hashes for r in cut.requests] == [(2,), (3,)]


def test_blocks_are_a_minute_of_the_trace() -> None:
    trace = poisson(0, n=1200)  # one a second
    blocks = blocks_of(trace)
    assert (np.diff(blocks) >= 0).all()
    assert blocks[0] == 0
    assert (blocks == np.minimum(trace.arrivals_s // 60, blocks.max())).all()
    assert blocks_of(poisson(0, n=100)).max() == 7


def test_the_warm_up_is_twice_the_slowest_requests() -> None:
    trace = poisson(0)
    outcomes = Bench.of([trace], [MODEL]).run(point(trace))
    e2e = outcomes.requests["ended_after_s"][outcomes.requests["finished"]]
    assert outcomes.warm_up_s == pytest.approx(2 * np.percentile(e2e, 99))
    first = int(np.argmax(outcomes.counted))
    assert outcomes.requests["arrival_s"][first] >= outcomes.warm_up_s
    assert outcomes.requests["arrival_s"][first - 1] < outcomes.warm_up_s
    assert Outcomes.unpack(outcomes.pack()).digest == outcomes.digest


def test_outcomes_of_a_closed_loop_belong_to_the_requests_of_the_trace() -> None:
    """Turns arrive in an order that depends on the policy, and blocks are those of the trace."""
    trace = synthesize("agents", num_requests=120, rate=4.0, seed=1, slo=SLO(1.0, 0.05))
    bench = Bench.of([trace], [MODEL])
    arrivals = []
    for policy in ("fcfs", "sjf"):
        outcomes = bench.run(replace(point(trace, 4.0), policy=policy))
        rows = outcomes.requests
        done = rows["finished"]
        assert done.mean() > 0.5
        assert rows["output_tokens"][done].tolist() == trace.output_tokens[done].tolist()
        by_arrival = np.argsort(rows["arrival_s"], kind="stable")
        assert (np.diff(by_arrival) < 0).any()
        ordered = Outcomes(rows[by_arrival])
        assert outcomes.warm_up_s == ordered.warm_up_s
        assert outcomes.counted[by_arrival].tolist() == ordered.counted.tolist()
        assert outcomes.queue_means().tolist() == ordered.queue_means().tolist()
        arrivals.append(by_arrival.tolist())
    assert arrivals[0] != arrivals[1]
