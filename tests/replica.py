"""A replica that is stepped by hand, to see what a policy decides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from slosched.core import Limits, Policy, Request, StepResult
from slosched.kv import KVCache
from slosched.scheduler import Scheduler


class Replica:
    """A replica with blocks of four tokens; arrivals are (name, prompt, output limit), also with
    priority."""

    def __init__(
        self,
        policy: Policy,
        tokens: int,
        num_blocks: int = 100,
        seats: int = 8,
        loras: int | None = None,
    ) -> None:
        limits = Limits(tokens, seats, max_loras=loras)
        self.scheduler = Scheduler(policy, KVCache(num_blocks, 4), limits)
        self.now_s = 0.0
        self.preempted: tuple[str, ...] = ()

    def add(self, *arrivals: Sequence[Any], lora_id: str | None = None) -> None:
        for name, tokens, max_tokens, *priority in arrivals:
            self.now_s += 1e-3
            self.scheduler.add_request(
                Request(
                    name,
                    self.now_s,
                    tokens,
                    max_tokens,
                    priority=priority[0] if priority else 0,
                    lora_id=lora_id,
                )
            )

    def step(self) -> Mapping[str, int]:
        self.now_s += 1.0
        batch = self.scheduler.schedule(self.now_s)
        self.preempted = batch.output.preempted
        emitted = {c.request.request_id: 7 for c in batch.chunks if c.emits_token}
        self.scheduler.update(batch, StepResult(emitted), self.now_s)
        return batch.output.num_scheduled_tokens

    def steps(self, count: int) -> list[Mapping[str, int]]:
        return [self.step() for _ in range(count)]
