"""Plans for a step of vLLM in which all its decodes are one group.

In most steps every decode gets its token.  A policy that can plan around a group of them
(`PlansBesideDecodes`) then need not go through hundreds of requests.  Its plans are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from slosched.core import (
    Limits,
    Policy,
    Request,
    SchedulerOutput,
    SchedulerView,
    planner_beside,
)
from slosched.integrations.vllm.decodes import Members, RunningDecodes
from slosched.integrations.vllm.kv_view import VLLMBlocks
from slosched.scheduler.declines import Declines
from slosched.scheduler.plan_check import PlanCheck


class GroupedPlans:
    """Asks a policy to plan beside vLLM's decodes, where that is possible and pays."""

    def __init__(self, policy: Policy, host: Any, kv: VLLMBlocks, limits: Limits) -> None:
        """Ask `policy` about steps of `host`, which is vLLM's scheduler.

        Never asks it where a decode may have more than its next token in a step (drafts), has to
        wait (pipelines), gives back blocks (sliding windows), or where others than the policy keep
        requests or blocks from it (adapters, KV connectors).
        """
        parallel = host.vllm_config.parallel_config
        is_possible = (
            kv.groups.are_plain
            and limits.max_loras is None
            and host.connector is None
            and host.vllm_config.speculative_config is None
            and parallel.pipeline_parallel_size == 1
        )
        self._policy = planner_beside(policy) if is_possible else None
        self._kv = kv
        self._members = Members(())
        self._declines = Declines()

    def plan(
        self, decodes: Sequence[Request], view: SchedulerView, check: PlanCheck
    ) -> SchedulerOutput | None:
        """Return the checked plan of a step that serves all `decodes` of the view, or None.

        None means that the policy has to be shown each of them.
        """
        if self._policy is None or self._declines.skips_step():
            return None
        group = self._group(decodes, view.running)
        if group is None or group.num_new_blocks > self._kv.num_free_blocks:
            return None
        others: Sequence[Request] = ()
        if len(decodes) < len(view.running):
            others = tuple([r for r in view.running if not r.is_decode])
        with self._kv.grouping(self._members.ids):
            output = self._policy.schedule_beside(group, replace(view, running=others))
            if output is not None:
                check(output, group)
        if output is None:
            self._declines.note_declined()
            return None
        self._declines.note_planned()
        planned = dict.fromkeys(self._members.ids, 1)
        planned.update(output.num_scheduled_tokens)
        return replace(output, num_scheduled_tokens=planned)

    def _group(
        self, decodes: Sequence[Request], running: Sequence[Request]
    ) -> RunningDecodes | None:
        """Return the decodes among the running requests as a group.

        They are none if they are less than two, or if one has emitted nothing yet: a prompt with
        one token left.
        """
        if decodes != self._members.requests or not self._members.have_emitted:
            self._members = Members(decodes)
        if len(decodes) < 2 or not self._members.have_emitted:
            return None
        are_oldest = running[len(decodes) - 1] is decodes[-1]
        return RunningDecodes(self._members, self._kv, are_oldest=are_oldest)
