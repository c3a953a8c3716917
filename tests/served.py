"""Requests served to their end by the real scheduler, step loop and torch engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from factories import make_model

from slosched.core import (
    SLO,
    Clock,
    Limits,
    PromptLogprobs,
    Request,
    RequestStatus,
    SamplingParams,
    fan_out,
)
from slosched.engine.background import InBackground
from slosched.engine.loop import Engine, MonotonicClock
from slosched.engine.overlap import OverlappedEngine
from slosched.kv import NO_PREFIX_HOST, KVCache, PrefixCaching, PrefixHost
from slosched.policy.spec import make_policy
from slosched.scheduler import PromptLookup, Scheduler, Speculation

if TYPE_CHECKING:
    from slosched.engine.torch import LoadedModel
    from slosched.engine.torch.lora import LoraAdapter

BLOCK_SIZE = 4
GREEDY = SamplingParams(ignore_eos=True)
PATIENT = SLO(ttft_s=3600.0, tpot_s=3600.0)
"""An SLO that this machine meets, so that no request is rejected."""


@dataclass(frozen=True)
class Replica:
    """All settings that decide which tokens are computed in which step."""

    policy: str = "fcfs"
    limits: Limits = field(default_factory=Limits)
    num_blocks: int = 64
    num_host_blocks: int = 64
    overlap: bool = False
    prefix_cache: PrefixCaching = PrefixCaching.OFF
    prefix_host: PrefixHost = NO_PREFIX_HOST
    num_draft_tokens: int = 0
    """Most draft tokens of prompt lookup in a step; 0 for no speculative decoding."""


@dataclass(frozen=True)
class Ask:
    """What one client asks for."""

    prompt: Sequence[int]
    max_tokens: int
    sampling: SamplingParams = GREEDY
    n: int = 1
    """How many times the prompt is answered."""
    lora_id: str | None = None
    adapter: LoraAdapter | None = None
    arrival_step: int = 0
    """The index of the step before which it arrives."""


class Run(NamedTuple):
    """What became of some asks."""

    answers: list[tuple[Request, ...]]
    """The ended requests of each ask."""
    num_steps: int
    scheduler: Scheduler
    told: dict[str, list[PromptLogprobs]]
    """What was told of the prompts, by request."""

    @property
    def requests(self) -> list[Request]:
        return [request for answer in self.answers for request in answer]

    @property
    def outputs(self) -> list[list[int]]:
        """Return the tokens of all requests."""
        return [request.output_token_ids for request in self.requests]

    @property
    def num_accepted_drafts(self) -> int:
        speculation = self.scheduler.speculation
        return 0 if speculation is None else speculation.num_accepted


def engine_of(model: LoadedModel, replica: Replica, clock: Clock) -> Engine:
    """Return an engine without requests."""
    from slosched.engine.torch import TorchExecutor

    executor = TorchExecutor(
        model,
        num_blocks=replica.num_blocks,
        block_size=BLOCK_SIZE,
        num_host_blocks=replica.num_host_blocks + replica.prefix_host.num_blocks,
    )
    index = replica.prefix_cache.new_index()
    kv = KVCache(
        *(replica.num_blocks, BLOCK_SIZE, replica.num_host_blocks),
        *(index, replica.prefix_host, model.window_tokens),
    )
    num_drafts = replica.num_draft_tokens
    speculation = Speculation(PromptLookup(1, 3), num_drafts) if num_drafts else None
    policy = make_policy(replica.policy)
    scheduler = Scheduler(policy, kv, replica.limits, make_model(), speculation)
    if replica.overlap:
        return OverlappedEngine(scheduler, InBackground(executor), clock)
    return Engine(scheduler, executor, clock)


def serve(model: LoadedModel, replica: Replica, asks: Sequence[Ask]) -> Run:
    """Serve all asks, which come in the order of their arrival, and check every step."""
    clock = MonotonicClock()
    engine = engine_of(model, replica, clock)
    scheduler = engine.scheduler
    answers: list[tuple[Request, ...]] = []
    ended: list[str] = []
    told: dict[str, list[PromptLogprobs]] = {}
    step = 0
    while len(answers) < len(asks) or engine.has_work:
        while len(answers) < len(asks) and asks[len(answers)].arrival_step <= step:
            answers.append(requests_of(asks[len(answers)], f"r{len(answers)}", clock.now_s()))
            scheduler.add_request(answers[-1][0])
        if engine.has_work:
            record = engine.step()
            ended += [request.request_id for request in record.ended]
            for name, part in record.result.prompt_logprobs.items():
                told.setdefault(name, []).append(part)
            scheduler.kv.check()
        step += 1
    run = Run(answers, step, scheduler, told)
    assert sorted(ended) == sorted(request.request_id for request in run.requests)
    check_nothing_is_held(scheduler.kv)
    return run


def check_nothing_is_held(kv: KVCache) -> None:
    assert kv.num_free_blocks == kv.num_blocks, "an ended request holds KV blocks"
    assert kv.num_free_host_blocks == kv.num_host_blocks, "an ended request holds host blocks"


def requests_of(ask: Ask, request_id: str, now_s: float, slo: SLO = PATIENT) -> tuple[Request, ...]:
    """Return the requests of an ask, which have yet to be queued."""
    request = Request(
        request_id=request_id,
        arrival_s=now_s,
        num_prompt_tokens=len(ask.prompt),
        max_tokens=ask.max_tokens,
        slo=slo,
        prompt_token_ids=ask.prompt,
        sampling=ask.sampling,
        lora_id=ask.lora_id,
        adapter=ask.adapter,
    )
    return fan_out(request, ask.n)


ADMITTING_ONLY_WHAT_FITS = {"slosserve"}
"""Policies that reject requests whose remaining tokens may not all fit into the KV cache."""


def was_refused(request: Request, policy: str) -> bool:
    return request.status is RequestStatus.REJECTED and policy in ADMITTING_ONLY_WHAT_FITS
