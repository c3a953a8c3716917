"""A sweep on a real Ray cluster on this machine, and the errors if there is none."""

from __future__ import annotations

import socket
import sys
import time

import pytest

from slosched.core import SLO
from slosched.evaluate.capacity import Contender, Plan, Study, Sweep, local_pool
from slosched.integrations.ray import LOCAL, RayError, ray_pool
from slosched.perfmodel import load_model
from slosched.policy.spec import PolicySpecError
from slosched.simulator.simulate import SimulationConfig
from slosched.workload import synthesize


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # warnings from Ray itself
def test_a_cluster_finds_what_this_process_finds() -> None:
    model = load_model("h100/llama-3.1-8b")
    windows = [
        synthesize("poisson", num_requests=60, seed=s, slo=SLO(0.2, 0.05), prompt=512, output=4)
        for s in range(2)
    ]
    contenders = [
        Contender(name, policy, model, "h100", SimulationConfig())
        for name, policy in (("fcfs", "fcfs"), ("bad", "no.such.module:Policy"))
    ]
    frames = []
    for make_pool in (local_pool(1), ray_pool(LOCAL)):
        sweep = Sweep(contenders, windows, Plan((0.9,), precision=0.2))
        sweep.run(make_pool)
        assert isinstance(sweep.measured["bad"].error, PolicySpecError)
        assert str(sweep.measured["bad"].error).startswith("cannot import no.such.module:Policy")
        frames.append(Study(list(sweep.measured.values()), windows).frame())
    assert frames[0].equals(frames[1])


def test_no_ray_is_said_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(RayError, match=r"pip install 'slosched\[ray\]'"):
        ray_pool(LOCAL)


@pytest.mark.filterwarnings("ignore")  # warnings from Ray itself
def test_an_address_where_nobody_listens_is_an_error_at_once() -> None:
    """Ray itself goes on trying for minutes."""
    pytest.importorskip("ray")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # but it does not listen
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        begin_s = time.monotonic()
        with pytest.raises(RayError, match=f"no Ray cluster at '{address}'.*ray start --head"):
            ray_pool(address)(lambda: None)
    assert time.monotonic() - begin_s < 20
