"""Traces so small, on devices so slow, that every schedule of theirs can be tried."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
from factories import make_model

from slosched.core import SLO, BatchShape, LatencyModel
from slosched.workload import Trace, TraceRequest

SMALL = make_model(0.4, 0.01, 0.02, 0.0, 0.05, 0.0, 0.3)
"""A device so slow that a few short requests overload it."""


def random_trace(seed: int, most_requests: int = 5, most_tokens: int = 6) -> Trace:
    rng = np.random.default_rng(seed)
    requests = [
        TraceRequest(
            f"r{i}",
            float(rng.uniform(0, 3)),
            int(rng.integers(1, most_tokens + 1)),
            int(rng.integers(1, most_tokens + 1)),
            SLO(float(rng.uniform(1, 6)), float(rng.uniform(0.5, 2))),
        )
        for i in range(rng.integers(1, most_requests + 1))
    ]
    return Trace.of(requests, "random")


def most_good(trace: Trace, model: LatencyModel, max_tokens: int) -> int:
    """Return the greatest number on time under `envelope`, over all schedules without preemption.

    A state is the time and, for each request, the tokens computed and out.  A request that is late
    is given up, since its tokens could only take time from others.
    """
    requests = trace.requests
    seen: dict[tuple[float, tuple[tuple[int, int], ...]], int] = {}

    def is_open(i: int, now_s: float, out: int) -> bool:
        r = requests[i]
        due_s = r.arrival_s + r.slo.ttft_s + out * r.slo.tpot_s
        return out < r.num_output_tokens and now_s <= due_s + 1e-9

    def best(now_s: float, state: tuple[tuple[int, int], ...]) -> int:
        done = sum(out == r.num_output_tokens for (_, out), r in zip(state, requests, strict=True))
        key = (round(now_s, 9), state)
        if key not in seen:
            seen[key] = max(
                (best(*after) for after in steps(now_s, state)),
                default=done,
            )
        return max(done, seen[key])

    def steps(
        now_s: float, state: tuple[tuple[int, int], ...]
    ) -> Iterator[tuple[float, tuple[tuple[int, int], ...]]]:
        later = [r.arrival_s for r in requests if r.arrival_s > now_s]
        if later:
            yield min(later), state
        choices = [
            range(
                requests[i].num_prompt_tokens + out - computed + 1
                if requests[i].arrival_s <= now_s and is_open(i, now_s, out)
                else 1
            )
            for i, (computed, out) in enumerate(state)
        ]
        for chunks in itertools.product(*choices):
            if not 0 < sum(chunks) <= max_tokens:
                continue
            shape = BatchShape()
            for n, (computed, _) in zip(chunks, state, strict=True):
                if n:
                    shape.add(n, computed)
            end_s = now_s + model.predict(shape)
            after = []
            for i, (n, (computed, out)) in enumerate(zip(chunks, state, strict=True)):
                emits = n and computed + n == requests[i].num_prompt_tokens + out
                if emits and not is_open(i, end_s, out):
                    after.append((computed, -1))  # late: never open again, never finished
                else:
                    after.append((computed + n, out + bool(emits)))
            if all(out >= 0 for _, out in after):
                yield end_s, tuple(after)

    return best(0.0, ((0, 0),) * len(requests))
