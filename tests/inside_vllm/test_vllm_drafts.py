"""Draft tokens inside vLLM, of which no plan knows, on random workloads."""

from __future__ import annotations

import random
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here: run `make test-vllm`")

from real_vllm import Loop, Workload, make_config, make_scheduler, random_workload
from vllm.config import SpeculativeConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds

from slosched.integrations.vllm import SLOScheduler
from slosched.integrations.vllm.truth import Divergence, Fallback, Truth

NUM_WORKLOADS, NUM_DRAFTS = 25, 3
DRAFT = 7
POLICIES = ("fcfs", "goodput+door", "sjf:token_budget=16")


class DraftingLoop(Loop):
    """A loop in which vLLM gets draft tokens, some of which are accepted."""

    def _tokens(self, request_id: str, output: Any) -> list[int]:
        place = self._place(request_id)
        num_drafts = len(output.scheduled_spec_decode_tokens.get(request_id, ()))
        num_accepted = self._chance("accepted", request_id, place).randint(0, num_drafts)
        return [self._token(request_id, place + i) for i in range(1 + num_accepted)]

    def _returned(self, output: Any, emitting: list[str]) -> list[Any]:
        told = super()._returned(output, emitting)
        if not self.is_async:  # else vLLM counts on NUM_DRAFTS for each request
            going_on = [n for n in output.num_scheduled_tokens if n in self.scheduler.requests]
            drafts = [[DRAFT] * self._num_drafts(name) for name in going_on]
            self.scheduler.update_draft_token_ids(DraftTokenIds(going_on, drafts))
        return told

    def _num_drafts(self, request_id: str) -> int:
        place = self._place(request_id)
        return self._chance("drafts", request_id, place).randint(0, NUM_DRAFTS)

    def _chance(self, what: str, request_id: str, place: int) -> random.Random:
        return random.Random(f"{self.workload.seed} {what} {request_id} {place}")


def answers(workload: Workload, *, is_async: bool, policy: str | None) -> tuple[Any, Any]:
    """Return the tokens and the end of each request, and the scheduler."""
    settings = {"policy": policy, "emulate": "h100/llama-3.1-8b"} if policy else None
    config = make_config(workload, is_async=is_async, settings=settings)
    config.speculative_config = SpeculativeConfig(
        method="ngram",
        num_speculative_tokens=NUM_DRAFTS,
        prompt_lookup_max=3,
        prompt_lookup_min=1,
        target_model_config=config.model_config,
        target_parallel_config=config.parallel_config,
    )
    alone = AsyncScheduler if is_async else Scheduler
    scheduler = make_scheduler(SLOScheduler if policy else alone, config)
    found: dict[str, tuple[tuple[int, ...], Any]] = {}
    for step in DraftingLoop(scheduler, workload, is_async).run():
        for name, tokens, end, _ in step.outputs:
            before, _ = found.get(name, ((), None))
            found[name] = before + tokens, end
    return found, scheduler


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_every_answer_is_vllms_and_full_steps_are_no_divergences(is_async: bool) -> None:
    total = Truth()
    for seed in range(NUM_WORKLOADS):
        workload = random_workload(seed)
        expected, _ = answers(workload, is_async=is_async, policy=None)
        for policy in POLICIES:
            found, scheduler = answers(workload, is_async=is_async, policy=policy)
            assert found == expected, f"seed {seed}, {policy}"
            truth = scheduler.truth
            assert not truth.fallbacks[Fallback.RAISED], f"seed {seed}, {policy}"
            total.num_steps += truth.num_steps
            total.num_diverged_steps += truth.num_diverged_steps
            total.num_cut_by_drafts += truth.num_cut_by_drafts
            total.divergences += truth.divergences
    assert total.num_cut_by_drafts > 100
    # Drafts may need blocks, too, so that vLLM preempts.
    assert set(total.divergences) <= {Divergence.LESS, Divergence.PREEMPTED}
    assert total.num_diverged_steps <= 0.02 * total.num_steps, total
