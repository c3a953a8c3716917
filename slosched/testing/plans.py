"""What a plan must be, and what must become of every request, whatever the policy."""

from __future__ import annotations

from collections.abc import Sequence

from slosched.core import (
    Policy,
    Request,
    RequestStatus,
    SchedulerOutput,
    SchedulerView,
    SloschedError,
)
from slosched.kv import KVCache


class LawBrokenError(SloschedError, AssertionError):
    """A policy, or the machinery under it, did what none may do."""


def require(condition: bool, law: str) -> None:
    """Raise LawBrokenError unless the condition holds."""
    if not condition:
        raise LawBrokenError(law)


class Watched(Policy):
    """Passes on what the policy decides, after checking it against what the policy saw."""

    def __init__(self, policy: Policy, kv: KVCache) -> None:
        self._policy = policy
        self._kv = kv
        self.decisions: list[tuple[float, SchedulerOutput]] = []

    def __repr__(self) -> str:
        return repr(self._policy)

    def schedule(self, view: SchedulerView) -> SchedulerOutput:
        before = _picture(view)
        output = self._policy.schedule(view)
        require(_picture(view) == before, "the policy changed its view")
        _check_plan(view, output, self._kv)
        self.decisions.append((view.now_s, output))
        return output


def _picture(view: SchedulerView) -> list[object]:
    """Everything a policy could have changed."""
    requests = (*view.waiting, *view.running, *view.swapped)
    return [
        view.kv.num_free_blocks,
        view.kv.num_free_host_blocks,
        *((r.request_id, r.status, r.num_computed_tokens, r.num_output_tokens) for r in requests),
        *((r.deadline_s, len(r.token_times_s), r.num_preemptions) for r in requests),
        *(view.kv.num_held_blocks(r.request_id) for r in requests),
    ]


def _check_plan(view: SchedulerView, output: SchedulerOutput, kv: KVCache) -> None:
    """A plan is legal: tokens, seats, blocks, 0 < n <= uncomputed.  Independent of Scheduler."""
    requests = {r.request_id: r for r in (*view.waiting, *view.running, *view.swapped)}
    leaving = {*output.preempted, *output.swapped_out, *output.rejected}
    running = {r.request_id for r in view.running} - leaving
    # What starters find in the cache counts once they hold it; then the bookkeeping is checked.
    tables = (table for name, table in kv.block_tables.items() if name not in leaving)
    held = len({block for table in tables for block in table})
    for request_id, n in output.num_scheduled_tokens.items():
        request = requests[request_id]
        require(request_id not in leaving, "a request that leaves is scheduled")
        found = output.num_found_tokens.get(request_id, request.num_computed_tokens)
        computed = found - (request_id in output.repeated)
        require(0 < n <= request.num_tokens - computed, f"{n} tokens are not uncomputed")
        block_size = view.kv.block_size
        has = max(view.kv.num_held_blocks(request_id), found // block_size)
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


def check_ends(requests: Sequence[Request], ended: Sequence[str], lengths: dict[str, int]) -> None:
    """Every request ends exactly once, and as it must."""
    require(sorted(ended) == sorted(r.request_id for r in requests), "not every end came once")
    for request in requests:
        times = request.token_times_s
        require(request.status.is_ended and request.end_reason is not None, "no end")
        require(len(times) == request.num_output_tokens, "token times and tokens differ")
        require(
            all(a < b for a, b in zip([request.arrival_s, *times], times, strict=False)),
            "token times do not increase from the arrival",
        )
        if request.status is RequestStatus.FINISHED:
            expected = min(lengths[request.request_id], request.max_tokens)
            require(request.num_output_tokens == expected, "finished with a wrong length")
        if request.status is RequestStatus.REJECTED:
            require(not times, "rejected after tokens came out")
