"""Many decode steps at once, where it is certain that nothing but decodes would run.

Most steps of a replay bring one token to each running request and change nothing else.  Their times
are computed one by one, from the same shapes as ever, but requests and blocks are booked once.
"""

from __future__ import annotations

import math

from slosched.core import BatchShape, SchedulerView
from slosched.engine.simulated import SimulatedExecutor, VirtualClock
from slosched.scheduler import Scheduler


def fast_forward(
    scheduler: Scheduler, executor: SimulatedExecutor, clock: VirtualClock, arrival_s: float
) -> int:
    """Run steps of decodes until `arrival_s`, or until a request would end; how many were run.

    Zero if the next step is not certain to be one.  To the last bit what `Engine.step` would have
    done as often, but for the numbers of the blocks, which nobody sees in a simulation.
    """
    if scheduler.num_waiting or scheduler.num_swapped or scheduler.limits.max_loras is not None:
        return 0
    now_s = clock.now_s()
    view = scheduler.view(now_s)
    until_s = scheduler.policy.decodes_until_s(view)
    if until_s <= now_s:
        return 0
    num_steps = _num_certain_steps(view, executor)
    if num_steps < 2:  # one is no faster than a step of the engine
        return 0
    model, num_decodes = view.latency_model, len(view.running)
    shape = BatchShape()
    shape.add_decodes([request.num_computed_tokens + 1 for request in view.running])
    times_s: list[float] = []
    while len(times_s) < num_steps and now_s < arrival_s:
        if until_s != math.inf and (model is None or model.predict(shape) >= until_s - now_s):
            break
        elapsed_s = executor.pass_time(shape)
        if model is not None:
            model.observe(shape, elapsed_s)
        now_s = clock.now_s()
        times_s.append(now_s)
        shape.decode_context_tokens += num_decodes
        shape.max_decode_context_tokens += 1
        shape.max_context_tokens += 1
    scheduler.book_decodes(times_s)
    return len(times_s)


def _num_certain_steps(view: SchedulerView, executor: SimulatedExecutor) -> int:
    """Steps in which all requests decode, none ends, and no block is missing."""
    if not view.running:
        return 0
    # In as many steps as a block has tokens, no request takes more than one new block.
    num_steps = view.kv.num_free_blocks // len(view.running) * view.kv.block_size
    for request in reversed(view.running):  # prompts that have begun are at the end
        if not (request.is_decode and request.num_output_tokens):
            return 0
        num_steps = min(num_steps, executor.num_tokens_left(request) - 1)
    return num_steps
