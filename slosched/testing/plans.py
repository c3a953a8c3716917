"""The laws for each plan of a policy, and for the end of every request."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain

from slosched.core import (
    NO_BLOCK,
    DraftOffer,
    Policy,
    Request,
    RequestStatus,
    SchedulerOutput,
    SchedulerView,
    SloschedError,
)
from slosched.core.merged_blocks import repeated_in
from slosched.kv import KVCache
from slosched.policy.kit.prompt_pack import PromptPack
from slosched.scheduler.plan_check import no_plan

TILE_TOKENS = PromptPack.tile_tokens


class LawBrokenError(SloschedError, AssertionError):
    """A policy, or the scheduler and engine that run it, broke a law."""


def require(condition: bool, law: str) -> None:
    """Raise LawBrokenError unless the condition holds."""
    if not condition:
        raise LawBrokenError(law)


PlanLaw = Callable[[SchedulerView, SchedulerOutput], None]
"""A function that raises LawBrokenError if a plan breaks a law, given the view that it is for."""


class Watched(Policy):
    """A policy that wraps another and checks each of its plans against the view that it saw."""

    def __init__(self, policy: Policy, kv: KVCache, laws: Sequence[PlanLaw] = ()) -> None:
        """Wrap `policy`; `laws` are checked for every plan, in addition to the general laws."""
        self._policy = policy
        self._kv = kv
        self._laws = laws
        self.decisions: list[tuple[float, SchedulerOutput]] = []

    def __repr__(self) -> str:
        return repr(self._policy)

    def choose_drafts(
        self, offers: Sequence[DraftOffer], output: SchedulerOutput, view: SchedulerView
    ) -> Sequence[int]:
        return self._policy.choose_drafts(offers, output, view)

    def schedule(self, view: SchedulerView) -> SchedulerOutput:
        before = _picture(view)
        output = self._policy.schedule(view)
        _check_type(self._policy, output)
        require(_picture(view) == before, "the policy changed its view")
        _check_plan(view, output, self._kv)
        if output.is_empty:
            check_idle(view)
        for law in self._laws:
            law(view, output)
        self.decisions.append((view.now_s, output))
        return output


def _check_type(policy: Policy, output: object) -> None:
    require(isinstance(output, SchedulerOutput), no_plan(type(policy).__name__, output))


def _picture(view: SchedulerView) -> list[object]:
    """Return everything in the view that a policy could have changed."""
    requests = (*view.waiting, *view.running, *view.swapped)
    return [
        view.kv.num_free_blocks,
        view.kv.num_free_host_blocks,
        *((r.request_id, r.status, r.num_computed_tokens, r.num_output_tokens) for r in requests),
        *((r.deadline_s, len(r.token_times_s), r.num_preemptions) for r in requests),
        *(view.kv.num_held_blocks(r.request_id) for r in requests),
    ]


def _check_plan(view: SchedulerView, output: SchedulerOutput, kv: KVCache) -> None:
    """Raise LawBrokenError unless the plan respects tokens, seats, KV blocks and swaps.

    This does not use the checks of Scheduler, so that it finds errors in them, too.
    """
    requests = {r.request_id: r for r in (*view.waiting, *view.running, *view.swapped)}
    leaving = {*output.preempted, *output.swapped_out, *output.rejected}
    running = {r.request_id for r in view.running} - leaving
    # Prefix blocks found in the cache count once a request holds them.
    tables = (table for name, table in kv.block_tables.items() if name not in leaving)
    held = len({block for table in tables for block in table} - {NO_BLOCK})
    for request_id, n in output.num_scheduled_tokens.items():
        require(request_id in requests, f"{request_id!r} is scheduled but was not shown")
        request = requests[request_id]
        require(request_id not in leaving, "a request that leaves is scheduled")
        found = output.num_found_tokens.get(request_id, request.num_computed_tokens)
        computed = found - (request_id in repeated_in(output))
        require(0 < n <= request.num_tokens - computed, f"{n} tokens are not uncomputed")
        block_size = view.kv.block_size
        has = max(len(kv.block_tables.get(request_id, ())), found // block_size)
        held += max(0, -(-(computed + n) // block_size) - has)
        running.add(request_id)
        if request.status is RequestStatus.SWAPPED:
            require(request_id in output.swapped_in, "a swapped request runs from the host")
    limits = view.limits
    total = sum(output.num_scheduled_tokens.values())
    require(total <= limits.max_num_batched_tokens, f"{total} tokens are too many")
    require(len(running) <= limits.max_num_seqs, f"{len(running)} seats are too many")
    require(held <= view.kv.num_blocks, f"{held} KV blocks are too many")
    if limits.max_num_swapped_blocks is not None:
        traffic = sum(view.kv.num_held_blocks(r) for r in output.swapped_out)
        traffic += sum(view.kv.num_held_host_blocks(r) for r in output.swapped_in)
        require(traffic <= limits.max_num_swapped_blocks, f"{traffic} blocks are copied")


def check_idle(view: SchedulerView) -> None:
    """Raise if the plan is empty although a request could run, as it might then never run."""
    idle = next(_could_run(view), None)
    if idle is not None:
        raise LawBrokenError(
            f"nothing is planned although {idle.request_id!r}, which is {idle.status}, could run"
        )


def _could_run(view: SchedulerView) -> Iterator[Request]:
    """Yield the requests that could run alone, within the KV blocks and the swap traffic.

    While others hold KV blocks, a waiting or swapped request may have to wait for an earlier one.
    """
    kv, most_copied = view.kv, view.limits.max_num_swapped_blocks

    def is_room_for(request: Request, num_tokens: int) -> bool:
        num_held = kv.num_held_blocks(request.request_id)
        return -(-num_tokens // kv.block_size) - num_held <= kv.num_free_blocks

    yield from (r for r in view.running if is_room_for(r, r.num_computed_tokens + 1))
    if view.running or kv.num_free_blocks < kv.num_blocks:
        return
    for request in (*view.swapped, *view.waiting):
        num_copied = kv.num_held_host_blocks(request.request_id)
        is_copied = most_copied is None or num_copied <= most_copied
        if is_copied and is_room_for(request, request.num_tokens):
            yield request


def check_no_room_is_left(view: SchedulerView, output: SchedulerOutput) -> None:
    """Raise if a request waits although the plan leaves tokens and a seat for it.

    This is for scenarios in which only tokens and seats are short; it ignores KV blocks and time.
    A step that cuts a prompt to end with a whole tile has no room for a part of one (`PromptPack`).
    """
    planned, limits = output.num_scheduled_tokens, view.limits
    num_left = limits.max_num_batched_tokens - sum(planned.values())
    if not num_left or (num_left < TILE_TOKENS and _ends_with_a_tile(view, output)):
        return
    left = f"a step of {limits.max_num_batched_tokens} tokens has room for {num_left} more, but"
    leaving = {*output.preempted, *output.swapped_out, *output.rejected}
    running = [r for r in view.running if r.request_id not in leaving]
    started = [r for r in view.waiting if r.request_id in planned]
    for request in (*running, *started):
        num_tokens = planned.get(request.request_id, 0)
        computes = (
            f"{request.request_id!r} computes {num_tokens} of {request.num_uncomputed_tokens}"
        )
        require(num_tokens == request.num_uncomputed_tokens, f"{left} {computes}")
    has_seat = len(running) + len(started) < limits.max_num_seqs
    names = (r.request_id for r in view.waiting)
    left_out = next((name for name in names if name not in {*planned, *leaving}), None)
    require(not has_seat or left_out is None, f"{left} {left_out!r} waits beside a free seat")


def _ends_with_a_tile(view: SchedulerView, output: SchedulerOutput) -> bool:
    """Tell whether the step holds whole tiles since it cuts one of its prompts."""
    planned = output.num_scheduled_tokens
    requests = chain(view.running, view.waiting)
    cut = [r for r in requests if 0 < planned.get(r.request_id, 0) < r.num_uncomputed_tokens]
    return sum(planned.values()) % TILE_TOKENS == 0 and len(cut) == 1


def check_ends(
    requests: Sequence[Request],
    ended: Sequence[str],
    lengths: dict[str, int],
    *,
    with_drafts: bool = False,
) -> None:
    """Raise LawBrokenError unless every request ended exactly once, with the right tokens.

    Only `with_drafts` may a step emit several tokens of a request.
    """
    require(sorted(ended) == sorted(r.request_id for r in requests), "not every end came once")
    for request in requests:
        times = request.token_times_s
        require(request.status.is_ended and request.end_reason is not None, "no end")
        require(len(times) == request.num_output_tokens, "token times and tokens differ")
        require(
            all(
                a < b or (with_drafts and a == b > request.arrival_s)
                for a, b in zip([request.arrival_s, *times], times, strict=False)
            ),
            "token times do not increase from the arrival",
        )
        if request.status is RequestStatus.FINISHED:
            expected = min(lengths[request.request_id], request.max_tokens)
            require(request.num_output_tokens == expected, "finished with a wrong length")
        if request.status is RequestStatus.REJECTED:
            require(not times, "rejected after tokens came out")
