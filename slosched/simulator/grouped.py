"""Simulated steps in which the decodes are one group while the policy treats them alike.

Most of a replay is one more token for each of a hundred decodes.  Where the policy can plan around
a group of them (`PlansBesideDecodes`), or says how long there is nothing to plan
(`ForeseesDecodes`), such a step costs only what its other requests cost.  The results are
those of `Engine.step` to the last bit, except for the ids of the KV blocks, which nothing in a
simulation depends on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from slosched.core import (
    BatchShape,
    ForeseesDecodes,
    PlansBesideDecodes,
    Request,
    RequestStatus,
    ScheduledBatch,
    foreseer,
    group_shape,
    planner_beside,
)
from slosched.engine.loop import Engine
from slosched.metrics import StepRow
from slosched.perfmodel.frozen import is_unchanging
from slosched.scheduler.declines import Declines
from slosched.simulator.clients import Clients
from slosched.simulator.decodes import GroupedDecodes
from slosched.simulator.simulated import SimulatedExecutor, VirtualClock

OnRow = Callable[[StepRow, Sequence[Request]], None]

_ROUNDING_S = 1e-6
"""More than what sums of times are off by.  Steps that end so close to the time at which the policy
plans again are run one by one."""


class GroupedSteps:
    """Runs an engine's steps with its decodes as a group, which may last from call to call."""

    def __init__(
        self,
        engine: Engine,
        executor: SimulatedExecutor,
        clock: VirtualClock,
        clients: Clients,
        on_row: OnRow | None = None,
        *,
        stops_at_ends: bool = False,
    ) -> None:
        """Group the decodes of `engine`; `run` returns at the end of a request if asked to."""
        scheduler = engine.scheduler
        self._stops_at_ends = stops_at_ends
        self._engine = engine
        self._scheduler = scheduler
        self._kv = scheduler.kv
        self._executor = executor
        self._clock = clock
        self._clients = clients
        self._on_row = on_row
        model = scheduler.latency_model
        learns = model is not None and not is_unchanging(model)
        self._observe = model.observe if model is not None and learns else None
        policy = scheduler.policy
        self._planner = planner_beside(policy)
        self._foreseeing = foreseer(policy)
        # Grouped decodes only take blocks: with a sliding window they also give back some.
        self._is_possible = (
            scheduler.limits.max_loras is None
            and scheduler.kv.window_tokens is None
            and (self._planner is not None or self._foreseeing is not None)
        )
        self._may_run_ahead = (
            on_row is None
            and self._observe is None
            and executor.knows_steps
            and not scheduler.kv.prefixes.copies_to_host
        )
        self._group: GroupedDecodes | None = None
        self._others: dict[str, Request] = {}
        """Running requests that are not in the group, since their prompts are being prefilled."""
        self._declines = Declines()

    def run(self, arrival_s: float) -> bool:
        """Run steps until `arrival_s`, or until the policy has to plan for all requests.

        Returns False if no step was run and the engine has to run one. Then there is no group, and
        all requests are up to date.
        """
        if not self._is_possible:
            return False
        if self._group is None:
            if self._declines.skips_step():
                return False
            self._form()
        num_steps, num_unfinished = 0, self._scheduler.num_unfinished
        while self._group is not None:
            if self._is_over(self._group) or not (num := self._run_some(self._group, arrival_s)):
                self._dissolve(declined=num_steps == 0)
                break
            num_steps += num
            if self._clock.now_s() >= arrival_s:
                break
            if self._stops_at_ends and self._scheduler.num_unfinished < num_unfinished:
                break
        return num_steps > 0

    def take_in(self, request: Request) -> None:
        """Take in a running decode that the scheduler took over between two steps."""
        if self._group is not None:
            self._group.join(request, self._executor.num_tokens_left(request))
            self._group.are_oldest = self._group.are_oldest and not self._others

    def _is_over(self, group: GroupedDecodes) -> bool:
        return bool(
            not group.num_decodes
            or group.num_new_blocks > self._kv.num_free_blocks
            or self._scheduler.has_groups_to_end
            # A prompt with one token left is a decode for the policy, but has not emitted yet.
            or (self._others and any(r.is_decode for r in self._others.values()))
        )

    def _run_some(self, group: GroupedDecodes, arrival_s: float) -> int:
        """Run at least one step, or none because the policy declines; return their number."""
        num_steps = 0
        if self._foreseeing is not None and not (self._others or self._scheduler.queues.waiting):
            num_steps = self._run_alone(group, self._foreseeing, arrival_s)
        if not num_steps and self._planner is not None:
            num_steps = self._step_with_others(self._planner, group)
        return num_steps

    def _form(self) -> None:
        """Group all decodes, unless the policy must be asked about all requests anyway."""
        queues = self._scheduler.queues
        if queues.swapped or (queues.waiting and self._planner is None):
            return
        group = GroupedDecodes(self._kv, self._scheduler.limits.deadline_rule)
        others: dict[str, Request] = {}
        for request_id, request in queues.running.items():
            if not request.is_decode:
                others[request_id] = request
            elif request.num_output_tokens:
                group.join(request, self._executor.num_tokens_left(request))
                group.are_oldest = not others
            else:  # a prompt's last token fits neither the others nor the group
                return
        if group.num_decodes > 1 and (self._planner is not None or not others):
            self._group, self._others = group, others

    def _dissolve(self, *, declined: bool) -> None:
        """Update all requests, and leave the next step, or several, to the engine."""
        assert self._group is not None
        self._group.book_all()
        self._group = None
        self._others = {}
        if declined:
            self._declines.note_declined()
        else:
            self._declines.note_planned()
            self._declines.skip_one()

    def _step_with_others(self, policy: PlansBesideDecodes, group: GroupedDecodes) -> int:
        scheduler, start_s = self._scheduler, self._clock.now_s()
        batch = scheduler.schedule_beside(policy, group, self._others.values(), start_s)
        if batch is None:
            return 0
        predicted_s = queued = None
        if self._on_row is not None:
            queued, model = self._queued(), scheduler.latency_model
            predicted_s = None if model is None else model.predict(batch.shape)
        now_s = self._pass_time(batch.shape, start_s)
        self._let_clients_leave(group, now_s)
        finished = group.advance((now_s,))
        scheduler.update(batch, self._executor.result(batch, now_s - start_s), now_s)
        self._end(finished, now_s)
        self._regroup(group, batch)
        if queued is not None:
            self._tell(start_s, batch.shape, predicted_s, queued)
        return 1

    def _run_alone(self, group: GroupedDecodes, policy: ForeseesDecodes, arrival_s: float) -> int:
        """Run steps of the group alone, until a member leaves, and return their number.

        They also stop at an arrival, when blocks run out, or when the policy wants to plan.
        """
        scheduler, on_row = self._scheduler, self._on_row
        model = scheduler.latency_model
        self._kv.prefixes.settle_ends()  # `schedule` would; the next block is taken without it
        until_s = policy.decodes_until_s(group, scheduler.limits)
        start_s = self._clock.now_s()
        if until_s <= start_s:
            return 0
        shape, num_steps = group_shape(group), 0
        if self._may_run_ahead and (num := self._run_ahead(group, shape, until_s, arrival_s)):
            return num
        while True:
            predicted_s = None
            if model is not None and (until_s != math.inf or on_row is not None):
                predicted_s = model.predict(shape)
            if until_s != math.inf and (predicted_s is None or predicted_s >= until_s - start_s):
                break
            if not group.take_blocks():
                break
            shape.num_swapped_blocks = self._num_written()
            if shape.num_swapped_blocks and model is not None and on_row is not None:
                predicted_s = model.predict(shape)
            queued = self._queued() if on_row is not None else None
            now_s = self._pass_time(shape, start_s)
            have_left = self._let_clients_leave(group, now_s)
            finished = group.advance((now_s,))
            num_steps += 1
            if finished:
                self._end(finished, now_s)
            if queued is not None:
                self._tell(start_s, shape, predicted_s, queued)
            if finished or have_left or now_s >= arrival_s:
                break
            shape.num_swapped_blocks = 0
            shape.lengthen_contexts()
            start_s = now_s
        return num_steps

    def _run_ahead(
        self, group: GroupedDecodes, shape: BatchShape, until_s: float, arrival_s: float
    ) -> int:
        """Run steps of the group alone whose times are known beforehand, and return their number.

        They end with the one after which a member has finished, or before.  None is run if
        something else may happen in them: blocks run out, a client leaves, or the policy plans.
        """
        most, gone_s = group.num_steps_to_end, self._clients.next_s
        if group.num_new_blocks_of(most) > self._kv.num_free_blocks:
            return 0
        if until_s != math.inf:
            if self._scheduler.latency_model is not self._executor.model:
                return 0
            gone_s = min(gone_s, until_s - _ROUNDING_S)
        ends_s = self._executor.decode_ends(shape, most, min(arrival_s, gone_s))
        if ends_s[-1] >= gone_s:
            ends_s.pop()
        if ends_s:
            if num_blocks := group.num_new_blocks_of(len(ends_s)):
                self._kv.lend(num_blocks)
            self._clock.advance_to(ends_s[-1])
            self._end(group.advance(ends_s), ends_s[-1])
        return len(ends_s)

    def _num_written(self) -> int:
        """Return the number of blocks that the prefix cache copies to the host in this step."""
        to_host, _ = self._kv.prefixes.take_copies()
        return len(to_host)

    def _pass_time(self, shape: BatchShape, start_s: float) -> float:
        """Let a step's time pass, let the model learn from it, and return when it ended."""
        elapsed_s = self._executor.pass_time(shape)
        if self._observe is not None:
            self._observe(shape, elapsed_s)
        return start_s + elapsed_s

    def _let_clients_leave(self, group: GroupedDecodes, now_s: float) -> bool:
        """Abort the requests whose clients left before the step ended; tell if there were any."""
        if now_s < self._clients.next_s:
            return False
        gone = self._clients.leaving(now_s)
        for request in gone:
            if request in group:
                group.leave(request)
            self._others.pop(request.request_id, None)
            self._clients.abort(request)
        return bool(gone)

    def _end(self, finished: Iterable[Request], now_s: float) -> None:
        for request in finished:
            reason = self._executor.end_reason(request)
            self._scheduler.end(request.request_id, reason, now_s)

    def _regroup(self, group: GroupedDecodes, batch: ScheduledBatch) -> None:
        """Move requests that emitted a token to the group, and begun prompts to the others."""
        others = self._others
        for request, _, _, emits_token, _ in batch.chunks:
            request_id = request.request_id
            if not emits_token:
                if not request.status.is_ended:
                    others[request_id] = request
                continue
            is_oldest = not others or next(iter(others)) == request_id
            others.pop(request_id, None)
            if not request.status.is_ended:
                group.join(request, self._executor.num_tokens_left(request))
                group.are_oldest = group.are_oldest and (is_oldest or not others)
        for request_id in batch.output.rejected:
            others.pop(request_id, None)
        if not others:
            group.are_oldest = True

    def _queued(self) -> tuple[int, int, float]:
        """Return the queues' state for a row: after the plan was applied, before the step runs."""
        queues = self._scheduler.queues
        return len(queues.waiting), len(queues.running), self._kv.used_fraction

    def _tell(
        self,
        start_s: float,
        shape: BatchShape,
        predicted_s: float | None,
        queued: tuple[int, int, float],
    ) -> None:
        assert self._on_row is not None
        ended = self._engine.take_ended()
        num_waiting, num_running, kv_used_fraction = queued
        row = StepRow(
            start_s=start_s,
            duration_s=self._clock.now_s() - start_s,
            predicted_s=predicted_s,
            num_prefill_tokens=shape.num_prefill_tokens,
            num_decodes=shape.num_decodes,
            num_waiting=num_waiting,
            num_running=num_running,
            num_swapped=0,
            kv_used_fraction=kv_used_fraction,
            num_rejected=sum(r.status is RequestStatus.REJECTED for r in ended),
        )
        self._on_row(row, ended)
