"""P-PAS: fewer prompt tokens in a step while several prompts and a decode compete."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from slosched.batch import BatchBuilder
from slosched.core import DecodeGroup, Request, SchedulerView, tunable
from slosched.policy.engines.vllm_v1.policy import VLLMV1
from slosched.policy.kit.checks import check_at_least


@dataclass
class VLLMPPAS(VLLMV1):
    """`vllm_v1`, with at most `capped_tokens` of all prompts in a step under prefill pressure.

    There is pressure while a decode runs and at least `pressing_prefills` requests, running or
    waiting, lack a part of their prompt.  Otherwise prompts may fill the step.  Decodes get their
    tokens either way.

    Source: Prefill-Pressure Adaptive Scheduling, arXiv 2608.15171, vLLM RFC #52906 (2026-08-19),
    and its patch of vLLM 0.22.1 (github.com/TimoSaemann/ppas-vllm at f36197d): N_th →
    `pressing_prefills`, B_cap → `capped_tokens`, B_max → `max_num_batched_tokens`, which is 16,384
    there.
    """

    capped_tokens: int = tunable(2048, 512, 1024, 4096)
    """Prompt tokens in a step under pressure."""
    pressing_prefills: int = 2
    """Requests without all of their prompt from which on there is pressure."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(
            1, capped_tokens=self.capped_tokens, pressing_prefills=self.pressing_prefills
        )

    def add_running(
        self,
        batch: BatchBuilder,
        view: SchedulerView,
        running: Sequence[Request],
        most_tokens: int | None,
    ) -> None:
        num_prefills = sum(map(_lacks_prompt, view.running))
        left = self._prompt_tokens(view, num_prefills, len(view.running) - num_prefills)
        victims = list(view.running)
        for is_prefill, group in groupby(running, key=_lacks_prompt):
            if not is_prefill:
                batch.add_preempting(group, victims, most_tokens)
                continue
            for request in group:
                if left <= 0:
                    break
                before = batch.num_free_tokens
                chunk = left if most_tokens is None else min(left, most_tokens)
                batch.add_preempting((request,), victims, chunk)
                left -= before - batch.num_free_tokens
        # All that still start are prompts.
        batch.num_free_tokens = min(batch.num_free_tokens, left)

    def add_running_beside(
        self,
        batch: BatchBuilder,
        decodes: DecodeGroup,
        view: SchedulerView,
        most_tokens: int | None,
    ) -> bool:
        if not all(map(_lacks_prompt, view.running)):
            return False  # one that computes its output again counts as a decode
        left = self._prompt_tokens(view, len(view.running), decodes.num_decodes)
        batch.num_free_tokens = min(batch.num_free_tokens, left)
        return super().add_running_beside(batch, decodes, view, most_tokens)

    def _prompt_tokens(self, view: SchedulerView, num_prefills: int, num_decodes: int) -> int:
        """Return the prompt tokens that this step may hold, where so many requests run."""
        most = view.limits.max_num_batched_tokens
        if num_decodes and num_prefills + len(view.waiting) >= self.pressing_prefills:
            return min(self.capped_tokens, most)
        return most


def _lacks_prompt(request: Request) -> bool:
    return request.num_computed_tokens < request.num_prompt_tokens
