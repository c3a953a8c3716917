"""One heat of one system in virtual time, in a process that is forked for it.

This module is imported by the process from which all others are forked.  vLLM is imported here and
not in functions, so that it is imported once; what is there then is left alone by the garbage
collector, which vLLM calls whenever an engine core is made.
"""

from __future__ import annotations

import gc
import time
from contextlib import nullcontext

import vllm

from experiments.inside_vllm.heats import Heat, Row, identity, scores
from experiments.inside_vllm.setups import System
from slosched.engine.torch.embedded import embedded_model_dir
from slosched.integrations.vllm.in_process import emulated_core, play
from slosched.integrations.vllm.warp import warped
from slosched.workload import Trace

gc.freeze()


def play_apart(heat: Heat, system: System, trace: Trace, is_virtual: bool) -> Row:
    """Play a heat to a new engine core and return its row; the process is of no use afterwards.

    `trace` holds the requests of the heat.
    """
    setup = heat.setup
    with warped() if is_virtual else nullcontext():
        core = emulated_core(
            embedded_model_dir(), setup.engine_options(system), setup.engine_settings(system)
        )
        begin_s, used_s = time.monotonic(), time.process_time()
        records = play(core, trace)
        took_s, used_s = time.monotonic() - begin_s, time.process_time() - used_s
    return {
        **identity(heat, system),
        **scores(setup, records),
        "max_num_batched_tokens": system.max_num_batched_tokens,
        "clock": "virtual" if is_virtual else "real",
        "slowdown": setup.slowdown,
        "max_lateness_s": 0.0,  # what has arrived is in the engine before its next step
        "device_s": round(took_s / setup.slowdown, 3),
        "cpu_s": round(used_s, 3),
        "vllm": vllm.__version__,
    }
