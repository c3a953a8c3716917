"""Thousands of random requests with all features: each ends once, and nothing is left of it.

Clients leave at random, some promises cannot be kept, and the KV cache holds few of the requests
that run.  The clock counts how often it is read, so that every run is the same.
"""

from __future__ import annotations

import gc
import random
import sys
from collections import Counter
from types import FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING

import pytest
import torch
from mixed_load import LORAS, PROMPTS, Kind, World, end_of
from served import PATIENT, Replica, check_nothing_is_held, engine_of, requests_of

from slosched.core import SLO, EndReason, Limits, PreemptionMode, Request, RequestStatus
from slosched.kv import NO_PREFIX_HOST, HostWrites, PrefixCaching, PrefixHost

if TYPE_CHECKING:
    from slosched.engine.loop import Engine
    from slosched.engine.torch import LoadedModel

HURRIED = SLO(ttft_s=0.03, tpot_s=0.01)
"""An SLO that some requests miss on a clock that advances a millisecond each time it is read."""


class CountingClock:
    """A clock on which a millisecond passes each time it is read."""

    def __init__(self) -> None:
        self._num_read = 0

    def now_s(self) -> float:
        self._num_read += 1
        return self._num_read / 1000


def a_replica(
    policy: str,
    mode: PreemptionMode,
    prefix_cache: PrefixCaching,
    *,
    overlap: bool,
    prefix_host: PrefixHost = NO_PREFIX_HOST,
) -> Replica:
    limits = Limits(max_num_batched_tokens=32, max_num_seqs=12, max_loras=2, preemption_mode=mode)
    return Replica(
        policy,
        limits,
        num_blocks=40,
        num_host_blocks=60,
        overlap=overlap,
        prefix_cache=prefix_cache,
        prefix_host=prefix_host,
        num_draft_tokens=4,
    )


SWAP, RECOMPUTE = PreemptionMode.SWAP, PreemptionMode.RECOMPUTE
REPLICAS = [
    a_replica("edf:drop=expired", SWAP, PrefixCaching.OFF, overlap=True),
    a_replica("goodput", RECOMPUTE, PrefixCaching.HASH, overlap=False),
    a_replica(
        "vllm_v1",
        SWAP,
        PrefixCaching.RADIX,
        overlap=True,
        prefix_host=PrefixHost(30, HostWrites.BACK),
    ),
    a_replica("vllm_v0", SWAP, PrefixCaching.MERGED, overlap=False),
    a_replica("sglang", RECOMPUTE, PrefixCaching.RADIX, overlap=False),
]


class Load:
    """Random requests on one engine, which are checked as they end."""

    def __init__(self, world: World, replica: Replica, seed: int) -> None:
        self._world = world
        self._draw = random.Random(seed)
        self._clock = CountingClock()
        self.engine: Engine = engine_of(world.model, replica, self._clock)
        self._num_asked = 0
        self.reasons: Counter[EndReason] = Counter()

    def play(self, num_requests: int) -> None:
        """Ask for at least so many answers, let clients leave, and wait until all have ended."""
        live: dict[str, tuple[Request, tuple[str, str | None, Kind]]] = {}
        num_new = 0
        while num_new < num_requests or self.engine.has_work:
            while num_new < num_requests and self._draw.random() < 0.4:
                asked, requests = self._ask()
                live |= {request.request_id: (request, asked) for request in requests}
                num_new += len(requests)
                self.engine.scheduler.add_request(requests[0])
            if live and self._draw.random() < 0.08:
                name = self._draw.choice(list(live))
                self.engine.scheduler.end(name, EndReason.CLIENT, self._clock.now_s())
            has_work = self.engine.has_work  # not if the last request was aborted just now
            for request in self.engine.step().ended if has_work else self.engine.take_ended():
                self._check_end(request, live.pop(request.request_id)[1])
            self.engine.scheduler.kv.check()
        assert not live, "some requests never ended"
        check_nothing_is_held(self.engine.scheduler.kv)

    def _ask(self) -> tuple[tuple[str, str | None, Kind], tuple[Request, ...]]:
        draw = self._draw
        asked = draw.choice(PROMPTS), draw.choice(LORAS), draw.choice(tuple(Kind))
        self._num_asked += 1
        slo = HURRIED if draw.random() < 0.2 else PATIENT
        ask = self._world.ask(*asked, n=draw.choice((1, 1, 1, 2, 4)))
        return asked, requests_of(ask, f"r{self._num_asked}", self._clock.now_s(), slo)

    def _check_end(self, request: Request, asked: tuple[str, str | None, Kind]) -> None:
        """Check that a request ended once, with the tokens of `generate` or the first of them."""
        assert request.end_reason is not None
        self.reasons[request.end_reason] += 1
        expected = self._world.expected(*asked)
        assert request.output_token_ids == expected[: request.num_output_tokens]
        if request.status is RequestStatus.FINISHED:
            assert request.output_token_ids == expected
            assert request.end_reason is end_of(asked[2])


def held_bytes(root: object) -> int:
    """Return the size of all that an object refers to, but for code, and models and what they have.

    O(objects).
    """
    skipped = (type, ModuleType, FunctionType, MethodType, torch.nn.Module, torch.Tensor)
    seen, found, total = {id(root)}, [root], 0
    while found:
        one = found.pop()
        total += sys.getsizeof(one)
        for other in gc.get_referents(one):
            if id(other) not in seen and not isinstance(other, skipped):
                seen.add(id(other))
                found.append(other)
    return total


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    from slosched.engine.torch import load_model

    return load_model("tiny-random", device="cpu", dtype="float32", num_threads=1)


@pytest.fixture(scope="module")
def world(model: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(model, tmp_path_factory.mktemp("adapters"))


@pytest.mark.parametrize(
    ("num_rounds", "replica"),
    [
        *(pytest.param(4, each, id=f"short-{each.policy}") for each in REPLICAS[:3]),
        *(
            pytest.param(20, each, id=f"long-{each.policy}", marks=pytest.mark.slow)
            for each in REPLICAS
        ),
    ],
)
def test_requests_end_once_and_leave_nothing(
    world: World, num_rounds: int, replica: Replica
) -> None:
    load = Load(world, replica, seed=1)
    sizes = []
    for _ in range(num_rounds):
        load.play(100 if num_rounds > 4 else 25)
        sizes.append(held_bytes(load.engine))
    assert {EndReason.LENGTH, EndReason.STOP, EndReason.CLIENT} <= load.reasons.keys()
    half = num_rounds // 2
    assert max(sizes[half:]) <= 1.5 * max(sizes[:half]), f"memory grows: {sizes}"
