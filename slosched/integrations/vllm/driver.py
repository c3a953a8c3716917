"""One step inside vLLM: mirror its queues, ask the policy, let vLLM carry out the plan."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.request import RequestStatus as Status

from slosched.core import BatchShape, LatencyModel, Limits, SchedulerOutput
from slosched.integrations.vllm.enact import Caps, narrowed, preempt
from slosched.integrations.vllm.kv_view import VLLMBlocks
from slosched.integrations.vllm.metrics import counter
from slosched.integrations.vllm.mirror import Mirror
from slosched.integrations.vllm.settings import Settings
from slosched.integrations.vllm.slo import INVALID, REJECTED
from slosched.integrations.vllm.steps import Record, StepTimes
from slosched.integrations.vllm.truth import Fallback, Truth
from slosched.perfmodel import OnlineModel
from slosched.perfmodel.measurement import Chunk
from slosched.scheduler.plan_check import PlanCheck
from slosched.simulator.apart import rehearse_apart

_PATIENCE_S = 1.0
"""Seconds for which a policy may leave the device idle while requests wait."""

logger = logging.getLogger("vllm.slosched")


class Driver:
    """The link between vLLM's scheduler `host` and a policy."""

    def __init__(
        self, host: Any, settings: Settings, device: str, record: Record | None = None
    ) -> None:
        self._host = host
        limits = Limits(
            max_num_batched_tokens=host.max_num_scheduled_tokens,
            max_num_seqs=host.max_num_active_reqs,
            max_loras=None if host.lora_config is None else host.lora_config.max_loras,
            deadline_rule=settings.deadline_rule,
        )
        parallel = host.vllm_config.parallel_config
        names = _names(host.vllm_config.model_config)
        fitted = settings.make_model(device, names, parallel.world_size)
        self._model: LatencyModel | None = None if fitted is None else OnlineModel(fitted)
        self._policy = settings.make_policy(self._model, limits)
        rehearse_apart(self._policy)
        self._kv = VLLMBlocks(host.kv_cache_manager, host.block_size, host.requests)
        per_request_s = 0.0 if fitted is None else fitted.server_time.per_request_s
        self._mirror = Mirror(host, self._kv, settings.make_promises(), limits, per_request_s)
        self._steps = StepTimes(self._model, record)
        self._ended: list[tuple[int, EngineCoreOutput]] = []
        self._busy_s = time.monotonic()
        self.caps = Caps()
        self.truth = Truth(counter(parallel.data_parallel_index))
        logger.info(
            "slosched: policy %s, latency model %s, %d tokens and %d requests a step, %d KV blocks",
            settings.policy,
            settings.profile or settings.emulate or "none",
            limits.max_num_batched_tokens,
            limits.max_num_seqs,
            self._kv.num_blocks,
        )

    def schedule(self, vllm_schedule: Callable[[], Any]) -> Any:
        """Return vLLM's `SchedulerOutput` of one step."""
        now_s = time.time()
        begins_s = self._steps.next_begins_s(now_s)
        plan = None
        self._mirror.note_ends(self._host.finished_req_ids, now_s)
        if self._host.pause_state is PauseState.UNPAUSED:
            self._mirror.refresh(begins_s)
            self._end_refused()
            plan = self._plan(begins_s)
        if plan is None:
            output, shape = vllm_schedule(), None
        else:
            output, shape = self._carry_out(plan, vllm_schedule)
        self._steps.launched(self._chunks(output), time.time(), shape)
        return output

    def returned(self, scheduler_output: Any, outputs: dict[int, Any]) -> None:
        """Handle a step whose results vLLM has just processed.

        Adds the ends of requests that were refused since the last call to vLLM's `outputs`.
        """
        now_s = time.time()
        self._steps.returned(now_s)
        self._mirror.note_tokens(scheduler_output.num_scheduled_tokens, now_s)
        for client, ended in self._ended:
            if client not in outputs:
                outputs[client] = EngineCoreOutputs()
            outputs[client].outputs.append(ended)
        self._ended.clear()

    def _plan(self, begins_s: float) -> SchedulerOutput | None:
        """Return the policy's plan, or None if vLLM's own order has to be used for this step."""
        try:
            plan = self._ask(begins_s)
        # Whatever error a policy raises, its requests must still be served.
        except Exception as error:
            self.truth.note_fallback(Fallback.RAISED, error)
            return None
        if plan.num_scheduled_tokens or self._steps.num_in_flight or self._is_idle:
            self._busy_s = time.monotonic()
        elif time.monotonic() - self._busy_s > _PATIENCE_S:
            self._busy_s = time.monotonic()
            self.truth.note_fallback(Fallback.STALLED)
            return None
        return plan

    @property
    def _is_idle(self) -> bool:
        return not (self._mirror.queues.running or self._mirror.queues.waiting)

    def _ask(self, begins_s: float) -> SchedulerOutput:
        plan = self._checked(begins_s, may_start=True)
        if not (plan.preempted and self._mirror.queues.finishing):
            return plan
        return self._ask_again(plan, begins_s)

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
        plan = self._policy.schedule(mirror.view(begins_s, self._model))
        # The check reads only counts, which vLLM's blocks provide as well.
        planner = type(self._policy).__name__
        PlanCheck(mirror.queues, self._kv, mirror.limits, planner)(plan)
        if may_start and mirror.num_seats > 0:
            return plan
        running = mirror.queues.running
        planned = {name: n for name, n in plan.num_scheduled_tokens.items() if name in running}
        return replace(plan, num_scheduled_tokens=planned, shape=None)

    def _carry_out(
        self, plan: SchedulerOutput, vllm_schedule: Callable[[], Any]
    ) -> tuple[Any, BatchShape | None]:
        """Return vLLM's output, and the batch's shape if it is known and equal to the plan's."""
        host, planned = self._host, plan.num_scheduled_tokens
        for request_id, reason in plan.rejected.items():
            self.truth.note_rejection(reason)
            self._end(request_id, f"{REJECTED}:{reason}")
            self._mirror.note_ends((request_id,), time.time(), reason)
        preempt(host, plan.preempted)
        with self.caps.of(planned), narrowed(host, planned):
            output = vllm_schedule()
        has_reached = partial(self._has_reached, plan.num_found_tokens)
        is_as_planned = self.truth.compare(planned, output, has_reached)
        return output, plan.shape if is_as_planned else None

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

    def _end_refused(self) -> None:
        for request_id, why in list(self._mirror.refused.items()):
            self._end(request_id, f"{INVALID}:{why}")
            self._mirror.note_ends((request_id,), time.time())

    def _end(self, request_id: str, stop_reason: str) -> None:
        """Remove the request from vLLM, and keep its end for the next outputs to its client."""
        for request in self._host.finish_requests(request_id, Status.FINISHED_ABORTED):
            ended = EngineCoreOutput(
                request_id=request_id,
                new_token_ids=[],
                finish_reason=FinishReason.ABORT,
                stop_reason=stop_reason,
                events=request.take_events(),
                trace_headers=request.trace_headers,
            )
            self._ended.append((request.client_index, ended))

    def _chunks(self, output: Any) -> Iterator[Chunk]:
        """Yield the chunks of a step as vLLM executes it, draft tokens included."""
        requests = self._host.requests
        for request_id, n in output.num_scheduled_tokens.items():
            yield n, requests[request_id].num_computed_tokens - n


def _names(model: Any) -> list[str]:
    """Return the names of the served model: those that clients use, and where it comes from."""
    served = model.served_model_name
    names = served if isinstance(served, list) else [served]
    return [*(name for name in names if name), str(model.model)]
