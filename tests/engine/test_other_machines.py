"""The same seed gives byte-identical results on another machine.

The last bit of powers, exponentials and sines in the C library and in numpy depends on the
processor.  Telling both libraries that this processor has no AVX and no FMA makes it behave like
another machine.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

ANOTHER_MACHINE = {
    "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX2,-AVX512F,-FMA,-FMA4",
    "NPY_DISABLE_CPU_FEATURES": "X86_V3 X86_V4",
    "PYTHONHASHSEED": "123",
}

REPLAYS = """
import hashlib
from slosched.core import SLO
from slosched.simulator.disturbances import Disturbances
from slosched.simulator.simulate import SimulationConfig, simulate
from slosched.perfmodel import load_model
from slosched.policy.spec import make_policy
from slosched.workload import synthesize

for kind, rate in (("azure_conv", 20.0), ("mooncake_conv", 1.0), ("gamma", 30.0)):
    trace = synthesize(kind, num_requests=100, rate=rate, seed=5, slo=SLO(1.0, 0.05))
    print(kind, hashlib.sha256(repr(trace.requests).encode()).hexdigest())
    for name in ("h100/llama-3.1-8b", "rtx4090/llama-3.1-8b"):
        model = load_model(name)
        for policy in ("sarathi", "slo_aware"):
            disturbed = Disturbances(0.05, 0.1, tail=0.02, stall_s=0.2, stall_every_s=5.0)
            config = SimulationConfig(num_blocks=20_000, disturbances=disturbed, seed=7)
            requests = simulate(trace, make_policy(policy), model, config)
            told = repr([(r.token_times_s, r.end_reason, r.end_s) for r in requests])
            print(kind, name, policy, hashlib.sha256(told.encode()).hexdigest())
"""

PREDICTIONS = """
import hashlib, random
from slosched.core import BatchShape
from slosched.perfmodel import load_model

draw = random.Random(2)
for name in ("h100/llama-3.1-8b", "rtx4090/llama-3.1-8b"):
    model, told = load_model(name), hashlib.sha256()
    for _ in range(20_000):
        shape = BatchShape()
        for _ in range(draw.randrange(3)):
            shape.add(draw.randrange(2, 1000), draw.randrange(9000))
        shape.add_decodes([draw.randrange(1, 9000) for _ in range(draw.randrange(1, 9))])
        told.update(model.predict(shape).hex().encode())
    print(name, told.hexdigest())
"""

POWERS = """
import hashlib, math
import numpy as np
x = np.random.default_rng(1).random(100_000)
print(hashlib.sha256(np.exp(x).tobytes() + np.log(x).tobytes()).hexdigest())
print(hashlib.sha256(repr([math.exp(a) for a in x.tolist()]).encode()).hexdigest())
"""


def told_by(code: str, **environment: str) -> str:
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return run.stdout


@pytest.fixture(autouse=True)
def _this_machine_can_pretend() -> None:
    if platform.machine() != "x86_64" or platform.libc_ver()[0] != "glibc":
        pytest.skip("another machine is only known how to pretend on x86-64 with glibc")
    if told_by(POWERS) == told_by(POWERS, **ANOTHER_MACHINE):
        pytest.skip("this machine computes exponentials as an older one does")


@pytest.mark.parametrize("code", [REPLAYS, PREDICTIONS], ids=["replays", "predictions"])
def test_another_machine_tells_the_same(code: str) -> None:
    assert told_by(code) == told_by(code, **ANOTHER_MACHINE)
