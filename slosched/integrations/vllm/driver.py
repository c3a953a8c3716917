"""One step inside vLLM: ask the policy, and let vLLM carry out the plan."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from vllm.v1.engine import (
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreOutputs,
    FinishReason,
)

from slosched.core import BatchShape, EndReason, Policy, SchedulerOutput
from slosched.integrations.vllm.enact import end, narrowed, preempt, preempt_surplus_adapters
from slosched.integrations.vllm.grouped import GroupedPlans
from slosched.integrations.vllm.link import Link
from slosched.integrations.vllm.loads import Loads
from slosched.integrations.vllm.settings import Settings
from slosched.integrations.vllm.slo import INVALID, rejection
from slosched.integrations.vllm.steps import Record
from slosched.integrations.vllm.truth import Fallback
from slosched.policy.door import Door
from slosched.scheduler.plan_check import PlanCheck
from slosched.simulator.apart import rehearse_apart

_PATIENCE_S = 1.0
"""Seconds for which a policy may leave the device idle while requests wait."""


class Driver(Link):
    """The link that lets vLLM run what a policy plans."""

    def __init__(
        self, host: Any, settings: Settings, device: str, record: Record | None = None
    ) -> None:
        super().__init__(host, settings, device, record)
        self._policy = settings.make_policy(self._model, self._limits)
        rehearse_apart(self._policy)
        self._grouped = GroupedPlans(self._policy, host, self._kv, self._limits)
        self._loads = None if host.connector is None else Loads(host, self._kv, self._mirror.queues)
        self._ended: list[tuple[int, EngineCoreOutput]] = []
        self._stands_since_s: float | None = None
        """When the policy began to let requests wait for nothing; None if it does not."""
        self._is_stuck = False
        """Whether vLLM could run nothing of the last plan, and nothing else ran."""

    def returned(self, scheduler_output: Any, outputs: dict[int, Any]) -> None:
        """Handle a step whose results vLLM has just processed.

        Adds the ends of requests that were refused since the last call to vLLM's `outputs`.
        """
        super().returned(scheduler_output, outputs)
        for client, ended in self._ended:
            if client not in outputs:
                outputs[client] = EngineCoreOutputs()
            outputs[client].outputs.append(ended)
        self._ended.clear()

    @property
    def _deciding(self) -> Policy:
        return self._policy

    def _run(
        self, begins_s: float, vllm_schedule: Callable[[], Any]
    ) -> tuple[Any, BatchShape | None]:
        self._end_refused()
        self._kv.groups.drop_unseen(self._host.running)
        if self._loads is not None:
            self._loads.begin_step()
        plan = self._plan(begins_s)
        if plan is None:
            return self._leave_to_vllm(vllm_schedule), None
        return self._carry_out(plan, vllm_schedule)

    def _leave_to_vllm(self, vllm_schedule: Callable[[], Any]) -> Any:
        self._mirror.crowded_out.clear()
        preempt_surplus_adapters(self._host)
        return vllm_schedule()

    def _plan(self, begins_s: float) -> SchedulerOutput | None:
        """Return the policy's plan, or None if vLLM's own order has to be used for this step."""
        if self._is_stuck:  # the policy might plan the same again
            self._is_stuck = False
            self.truth.note_fallback(Fallback.STALLED)
            return None
        try:
            plan = self._ask(begins_s)
        # Whatever error a policy raises, its requests must still be served.
        except Exception as error:
            self.truth.note_fallback(Fallback.RAISED, error)
            return None
        does_something = plan.num_scheduled_tokens or plan.rejected or plan.preempted
        if does_something or self._steps.num_in_flight or self._is_idle:
            self._stands_since_s = None
        elif self._stands_since_s is None:
            self._stands_since_s = time.monotonic()
        elif time.monotonic() - self._stands_since_s > _PATIENCE_S:
            self._stands_since_s = None
            self.truth.note_fallback(Fallback.STALLED)
            return None
        return plan

    @property
    def _is_idle(self) -> bool:
        return not (self._mirror.queues.running or self._mirror.queues.waiting)

    def _ask(self, begins_s: float) -> SchedulerOutput:
        plan = self._checked(begins_s, may_start=True)
        if self._loads is not None:
            plan = self._ask_with_loads(self._loads, plan, begins_s)
        if not (plan.preempted and self._mirror.queues.finishing):
            return plan
        if self._loads is not None and self._host.defer_block_free:
            return plan
        return self._ask_again(plan, begins_s)

    def _ask_with_loads(
        self, loads: Loads, plan: SchedulerOutput, begins_s: float
    ) -> SchedulerOutput:
        """Ask the policy again until the plan fits what the KV connector loads and keeps.

        Each round settles at least one request, so it ends.
        """
        mirror, may_start = self._mirror, True
        while True:
            if withheld := self._kept_by_connector(plan):
                freed = [name for name in plan.preempted if name not in withheld]
                preempt(self._host, freed)
                may_start &= not freed
                mirror.withheld.update(withheld)
                mirror.refresh(begins_s)
                loads.begin_step()
            elif not loads.settle(plan):
                return plan
            plan = self._checked(begins_s, may_start=may_start)

    def _kept_by_connector(self, plan: SchedulerOutput) -> set[str]:
        """Return the requests whose planned preemption would free no block in this step.

        A step in flight may still write their blocks, or the connector is about to free others, or
        a request that was admitted later is hidden and will give up its blocks first.  vLLM waits
        in all these cases.
        """
        if not plan.preempted:
            return set()
        host, finishing = self._host, self._mirror.queues.finishing
        if host.connector.has_pending_block_frees():
            return set(plan.preempted)
        if not host.defer_block_free:
            return set()
        places = {request.request_id: place for place, request in enumerate(host.running)}
        last = max((places[name] for name in finishing), default=-1)
        return {
            name
            for name in plan.preempted
            if places[name] < last or not host._request_blocks_can_be_freed(host.requests[name])
        }

    def _ask_again(self, plan: SchedulerOutput, begins_s: float) -> SchedulerOutput:
        """Ask the policy again, after taking blocks from requests whose last token is on its way.

        Such requests should lose their blocks before a request admitted earlier loses work. vLLM
        takes them from the back, one by one, and starts no request in such a step.  A plan does not
        know of these requests, so the policy is asked again after each of them.
        """
        mirror, host = self._mirror, self._host
        while plan.preempted and mirror.queues.finishing:
            names = [request.request_id for request in host.running]
            behind = names[min(map(names.index, plan.preempted)) :]
            candidates = (*mirror.queues.finishing, *plan.preempted)
            if not any(name in mirror.queues.finishing for name in behind):
                break
            preempt(host, [max(candidates, key=names.index)])
            mirror.refresh(begins_s)
            plan = self._checked(begins_s, may_start=False)
        return plan

    def _checked(self, begins_s: float, *, may_start: bool) -> SchedulerOutput:
        mirror = self._mirror
        view = mirror.view(begins_s, self._model)
        # The check reads only counts, which vLLM's blocks provide as well.
        check = PlanCheck(mirror.queues, self._kv, view.limits, type(self._policy).__name__)
        may_start &= mirror.num_seats > 0
        if may_start and (plan := self._grouped.plan(mirror.decodes, view, check)) is not None:
            return plan
        plan = self._policy.schedule(view)
        check(plan)
        if may_start:
            return plan
        running = mirror.queues.running
        planned = {name: n for name, n in plan.num_scheduled_tokens.items() if name in running}
        return replace(plan, num_scheduled_tokens=planned, shape=None)

    def _carry_out(
        self, plan: SchedulerOutput, vllm_schedule: Callable[[], Any]
    ) -> tuple[Any, BatchShape | None]:
        """Return vLLM's output, and the batch's shape if it is known and equal to the plan's."""
        host, planned = self._host, plan.num_scheduled_tokens
        if plan.rejected:
            self._reject(plan.rejected)
        preempt(host, plan.preempted)
        order: Collection[str] = planned if self._loads is None else self._loads.order(planned)
        with self.caps.of(planned), narrowed(host, order):
            output = vllm_schedule()
        has_reached = partial(self._has_reached, plan.num_found_tokens)
        expected: Mapping[str, int] = planned
        if self._loads is not None:
            expected = self._loads.without_held_back(planned, order, output.num_scheduled_tokens)
            self._loads.free_failed(output)
        is_as_planned = self.truth.compare(expected, output, has_reached)
        executed = output.num_scheduled_tokens
        self._mirror.crowded_out = set() if is_as_planned else self._crowded_out(expected, executed)
        self._is_stuck = bool(expected) and not executed and not self._makes_room(output)
        is_as_planned &= expected is planned
        return output, plan.shape if is_as_planned else None

    def _makes_room(self, output: Any) -> bool:
        """Tell whether a plan of which vLLM ran nothing may fit the next time.

        It may after a step in flight, or if others than those with images are planned.  It may not
        if vLLM preempted what was to run: that would start over and be preempted again.
        """
        is_in_flight = self._steps.num_in_flight and not output.preempted_req_ids
        return bool(is_in_flight or self._mirror.crowded_out)

    def _crowded_out(self, planned: Mapping[str, int], executed: Mapping[str, int]) -> set[str]:
        """Return those with images that vLLM did not run, and those that it did not before.

        Its encoder's cache may be full of images of a request whose turn a policy sees later.  They
        are hidden until that one has run.
        """
        requests = self._host.requests
        left = {n for n in planned if n not in executed and requests[n].has_encoder_inputs}
        return left and left | self._mirror.crowded_out

    def _has_reached(self, found: Mapping[str, int], request_id: str, num_planned: int) -> bool:
        """Tell whether vLLM computed as far as planned, wherever it began.

        The mirror still shows the request as it was planned; `found` holds the cached tokens that
        the plan expected it to find.
        """
        ours = self._mirror.queues.find(request_id)
        assert ours is not None, f"{request_id!r} was planned but is in no queue"
        num_prior = found.get(request_id, ours.num_computed_tokens)
        theirs = self._host.requests[request_id]
        return bool(theirs.num_computed_tokens >= num_prior + num_planned)

    def _reject(self, rejected: Mapping[str, EndReason]) -> None:
        """End the requests that a plan rejects, but for those that are to be served all the same.

        These give back their KV blocks, since the plan counts on them.
        """
        now_s, mirror = time.time(), self._mirror
        eased = {name for name, reason in rejected.items() if mirror.ease(name, reason)}
        preempt(self._host, eased & mirror.queues.running.keys())
        ending = {name: reason for name, reason in rejected.items() if name not in eased}
        self._end({name: self._why(name, reason, now_s) for name, reason in ending.items()})
        for reason in dict.fromkeys(ending.values()):
            names = [name for name, why in ending.items() if why is reason]
            self.truth.note_rejections(reason, len(names))
            mirror.note_ends(names, now_s, reason)

    def _why(self, request_id: str, reason: EndReason, now_s: float) -> str:
        """Return the `stop_reason` of a rejected request, with what a door says of it."""
        try:
            return self._what_door_says(request_id, reason, now_s)
        # It is rejected all the same; that the policy cannot say more must not stop the engine.
        except Exception as error:
            self.truth.note_silence(error)
            return rejection(reason)

    def _what_door_says(self, request_id: str, reason: EndReason, now_s: float) -> str:
        door, model = self._policy, self._model
        if not isinstance(door, Door) or model is None:
            return rejection(reason)
        if (request := self._mirror.queues.find(request_id)) is None:
            return rejection(reason)
        if (refusal := door.refusals.get(request_id)) is not None:
            return rejection(reason, refusal)
        return rejection(reason, None, door.retry_after_s(replace(request, arrival_s=now_s), model))

    def _end_refused(self) -> None:
        refused = dict(self._mirror.refused)
        if refused:
            self._end({name: f"{INVALID}:{why}" for name, why in refused.items()})
            self._mirror.note_ends(refused, time.time())

    def _end(self, stop_reasons: Mapping[str, str]) -> None:
        """Remove requests from vLLM, and keep their ends for the next outputs to their clients."""
        by_id = {request.request_id: request for request in end(self._host, stop_reasons)}
        for request_id, stop_reason in stop_reasons.items():
            request = by_id.get(request_id)
            if request is None:
                continue
            if self._host.log_stats:  # vLLM's metrics end the time in the queue here, or else at 0
                request.record_event(EngineCoreEventType.SCHEDULED, time.monotonic())
            ended = EngineCoreOutput(
                request_id=request_id,
                new_token_ids=[],
                finish_reason=FinishReason.ABORT,
                stop_reason=stop_reason,
                events=request.take_events(),
                trace_headers=request.trace_headers,
            )
            self._ended.append((request.client_index, ended))
