"""A trace played to vLLM's engine core in virtual time: what it decides, and that nothing sleeps."""

from __future__ import annotations

import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here: run `make test-vllm`")

from real_vllm import model_dir

from slosched.core import SLO, RequestStatus
from slosched.integrations.vllm.in_process import emulated_core, play
from slosched.integrations.vllm.warp import warped
from slosched.metrics import RequestRecord
from slosched.workload.trace import Trace, TraceRequest

SLOWDOWN = 40.0
"""Steps of an H100 take a few milliseconds, and so some tenths of a second here: far longer than
what a busy machine adds to them."""
TRIES = 3
"""Runs in real time of which one has to go through without a pause of the machine of that length.
"""
OPTIONS = (
    *("--max-model-len", "4096", "--max-num-batched-tokens", "512", "--max-num-seqs", "64"),
    *("--num-gpu-blocks-override", "1024", "--no-enable-prefix-caching"),
)
POLICY = ("--scheduler-cls", "slosched.integrations.vllm.SLOScheduler")
SETTINGS = {"emulate": "h100/llama-3.1-8b", "emulate_slowdown": SLOWDOWN}
PROMISE = SLO(ttft_s=1.0 * SLOWDOWN, tpot_s=0.1 * SLOWDOWN)


@dataclass
class Played:
    records: list[RequestRecord]
    plans: list[dict[str, int]]
    """The scheduled tokens of each step that was not empty, by request."""
    took_s: float
    """The time of the run by the clock that vLLM saw."""


def trace(*arrivals_s: float, slo: SLO = PROMISE) -> Trace:
    lengths = [(700, 6), (40, 9), (900, 5), (300, 7), (16, 12), (600, 4)]
    return Trace(
        tuple(
            TraceRequest(f"r{i}", arrival_s, prompt, output, slo)
            for i, (arrival_s, (prompt, output)) in enumerate(
                zip(arrivals_s, lengths, strict=False)
            )
        ),
        "spaced",
    )


def played(requests: Trace, options: tuple[str, ...] = OPTIONS, **settings: object) -> Played:
    """Play requests to a new engine core by the clock of this process."""
    core = emulated_core(Path(model_dir()), options, SETTINGS | settings)
    plans = []
    execute = core.model_executor.execute_model

    def watched(scheduler_output, non_block=False):  # type: ignore[no-untyped-def]
        if scheduler_output.num_scheduled_tokens:
            plans.append(dict(scheduler_output.num_scheduled_tokens))
        return execute(scheduler_output, non_block=non_block)

    core.model_executor.execute_model = watched
    begin_s = time.monotonic()
    records = play(core, requests)
    took_s = time.monotonic() - begin_s
    core.shutdown()
    return Played(records, plans, took_s)


def middles(requests: Played, *steps: int) -> list[float]:
    """Return times in the middle of some decodes of the first request, which runs alone."""
    times_s = requests.records[0].token_times_s
    return [(times_s[i] + times_s[i + 1]) / 2 for i in steps]


@pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])
@pytest.mark.parametrize("options", [OPTIONS, (*OPTIONS, *POLICY)], ids=["vllm", "goodput"])
def test_plans_are_those_of_real_time(options: tuple[str, ...], is_async: bool) -> None:
    """Requests arrive in the middle of steps, so that a step a little longer changes nothing."""
    with warped():
        alone = played(trace(0.0), options, emulate_async=is_async)
        arrivals_s = [0.0, *middles(alone, 1, 3), alone.took_s + 1.0]
        quick = played(trace(*arrivals_s), options, emulate_async=is_async)
    for _ in range(TRIES):
        slow = played(trace(*arrivals_s), options, emulate_async=is_async)
        if slow.plans == quick.plans:
            break
    assert quick.plans == slow.plans
    assert len(quick.plans) > 15
    assert max(len(plan) for plan in quick.plans) >= 2, "requests run together"
    # Machine time comes on top of each step in real time, and of none in virtual time.
    assert slow.took_s > quick.took_s > alone.took_s + 1.0


def test_virtual_runs_repeat_exactly_and_do_not_sleep() -> None:
    """An hour passes in each run; if it did in reality, the test would time out."""
    arrivals_s = [0.0, 0.2, 0.4, 600.0, 600.2, 3600.0]
    runs = []
    for _ in range(2):
        with warped():
            runs.append(played(trace(*arrivals_s), (*OPTIONS, *POLICY)))
    assert runs[0].records == runs[1].records
    assert runs[0].plans == runs[1].plans
    assert runs[0].took_s > 3600.0
    for record in runs[0].records:
        assert record.status is RequestStatus.FINISHED
        assert record.token_times_s[0] > record.arrival_s


def test_a_step_takes_its_predicted_time() -> None:
    from slosched.core import BatchShape
    from slosched.integrations.vllm.settings import Settings

    device = Settings(**SETTINGS).make_device()
    assert device is not None
    shape = BatchShape()
    shape.add(1, 700)
    with warped():
        times_s = played(trace(0.0)).records[0].token_times_s
    assert times_s[1] - times_s[0] == pytest.approx(device.predict(shape))


def test_a_rejection_is_told_as_one() -> None:
    hopeless = trace(0.0, slo=SLO(ttft_s=0.001, tpot_s=2.0))
    with warped():
        [record] = played(hopeless, (*OPTIONS, *POLICY)).records
    assert record.status is RequestStatus.REJECTED
    assert not record.token_times_s


def test_what_cannot_be_played_is_refused() -> None:
    with warped():
        core = emulated_core(Path(model_dir()), OPTIONS, SETTINGS)
        two = Trace((TraceRequest("r", 0.0, 8, 2, PROMISE, n=2),), "two")
        with pytest.raises(ValueError, match="several answers"):
            play(core, two)
        core.shutdown()


def test_only_the_thread_that_entered_moves_the_clock() -> None:
    real = time.monotonic()
    with warped() as clock:
        begin_s = time.monotonic()
        other = threading.Thread(target=time.sleep, args=(0.01,))
        other.start()
        other.join()
        assert time.monotonic() == time.time() == begin_s
        time.sleep(5000.0)
        assert clock.now_s() == time.monotonic() == begin_s + 5000.0
        with pytest.raises(ValueError, match="negative"):
            time.sleep(-1)
    assert 0 <= time.monotonic() - real < 5000.0


def test_the_script_on_the_page_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "vllm.md").read_text("utf-8")
    script = page.partition("```python\n# virtual_time.py\n")[2].partition("```")[0]
    monkeypatch.setattr(sys, "argv", ["virtual_time.py", model_dir()])
    exec(compile(script, "virtual_time.py", "exec"), {})  # the page is ours
    assert "num_offered=200" in capsys.readouterr().out
