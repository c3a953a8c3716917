"""Replays in a process of their own: its answers, its share of a core, its end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest
from factories import make_model
from processes import is_alive

from slosched.core import SLO, Limits
from slosched.perfmodel import OnlineModel
from slosched.perfmodel.frozen import frozen
from slosched.policy.portfolio.policy import Portfolio
from slosched.policy.portfolio.question import Answer, PastRequest, Question
from slosched.policy.spec import make_policy
from slosched.simulator.apart import Apart, rehearse_apart
from slosched.simulator.race import answer

QUESTION = Question(
    requests=tuple(
        PastRequest(i / 10, 300, 100, 20, True, SLO(1.0, 0.05), 0, None) for i in range(40)
    ),
    output_lengths=(20,),
    current="goodput",
    candidates=("goodput", "edf"),
    eliminated=(),
    limits=Limits(),
    num_blocks=1000,
    block_size=16,
    num_host_blocks=0,
    latency_model=frozen(OnlineModel(make_model())),
    horizon_s=0.0,
    max_requests=800,
    min_gain=0.005,
    seed=0,
)


def wait_for(condition: Callable[[], bool], what: str) -> None:
    for _ in range(1200):
        if condition():
            return
        time.sleep(0.05)
    raise AssertionError(f"{what} did not happen within a minute")


def answered(forecaster: Apart) -> Answer | None:
    assert forecaster.ask(QUESTION)
    wait_for(lambda: not forecaster.is_busy, "an answer")
    return forecaster.take_answer()


pytestmark = pytest.mark.e2e


@pytest.fixture
def apart() -> Iterator[Apart]:
    forecaster = Apart(mean_share=1.0, peak_share=1.0)
    yield forecaster
    forecaster.close()


def test_its_answer_is_that_of_a_replay_in_line_and_its_death_is_survived(apart: Apart) -> None:
    found = answered(apart)
    assert found is not None
    assert found.good == answer(QUESTION).good
    assert apart.take_answer() is None, "an answer is handed out once"
    first = apart.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    time.sleep(found.cpu_s)  # until the next question is allowed
    assert answered(apart) is None, "the question of a dead process is lost"
    assert not apart.is_busy
    again = answered(apart)
    assert again is not None
    assert again.good == found.good
    assert apart.pid != first


def test_no_question_is_taken_while_its_share_of_a_core_is_used_up() -> None:
    forecaster = Apart(mean_share=0.001, peak_share=1.0)
    assert forecaster.ask(QUESTION)
    assert not forecaster.ask(QUESTION), "one question at a time"
    wait_for(lambda: not forecaster.is_busy, "an answer")
    assert not forecaster.ask(QUESTION)
    forecaster.close()


def test_it_dies_with_the_process_that_asks() -> None:
    program = (
        "import sys, time\n"
        f"sys.path[:0] = {sys.path!r}\n"
        "from test_apart import Apart, QUESTION, wait_for\n"
        "forecaster = Apart()\n"
        "forecaster.ask(QUESTION)\n"
        "wait_for(lambda: forecaster.pid is not None, 'a process')\n"
        "print(forecaster.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    asking = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert asking.stdout is not None
    pid = int(asking.stdout.readline())
    assert is_alive(pid)
    asking.kill()
    asking.wait()
    asking.stdout.close()
    wait_for(lambda: not is_alive(pid), "the end of the process")


def test_a_portfolio_inside_a_wrapper_gets_a_process_and_other_policies_none() -> None:
    policy = make_policy("portfolio|edf|fcfs+early_rejection")
    forecaster = rehearse_apart(policy)
    assert forecaster is not None
    inner = policy.inner  # type: ignore[attr-defined]
    assert isinstance(inner, Portfolio)
    assert inner.forecaster is forecaster
    assert forecaster.pid is None, "it is started by the first question"
    forecaster.close()
    assert rehearse_apart(make_policy("edf")) is None


def test_a_share_of_a_core_is_checked() -> None:
    with pytest.raises(ValueError, match="share of a core"):
        Apart(mean_share=0.0)
