"""One step of vLLM V0 while it is planned: its three queues, and the operations on each."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from itertools import chain

from slosched.core import (
    DecodeGroup,
    EndReason,
    PreemptionMode,
    Request,
    RequestStatus,
    SchedulerOutput,
    SchedulerView,
)
from slosched.policy.engines.vllm_v0.blocks import AllocStatus, BlockManager
from slosched.policy.engines.vllm_v0.builder import RepeatingBuilder


class Step:
    """The plan of one step.  `running`, `waiting` and `swapped` hold requests not yet looked at.

    Decisions go into the `RepeatingBuilder` at the end, in the order in which they run.  Every call
    takes O(1) per request, and with prefix caching O(1) per block of a prompt.
    """

    def __init__(
        self,
        view: SchedulerView,
        running: Iterable[Request],
        waiting: Iterable[Request],
        blocks: BlockManager,
        beside: DecodeGroup | None = None,
    ) -> None:
        """Start a plan; the decodes of `beside` have their slots before any of these requests."""
        self.running = deque(running)
        self.waiting = deque(waiting)
        self.swapped = deque(view.swapped)
        self.blocks = blocks
        self.prefills: list[Request] = []
        """Prompts that start in this step."""
        self.running_prefills: list[Request] = []
        self.running_decodes: list[Request] = []
        self.swapped_prefills: list[Request] = []
        self.swapped_decodes: list[Request] = []
        self.victims: list[Request] = []
        """Requests that `schedule_running` preempted, in that order."""
        self._batch = RepeatingBuilder(view, beside=beside)
        self._num_tokens: dict[str, int] = {}
        """Tokens by request as vLLM's `SchedulingBudget` counts them, including cached ones."""
        self._num_free_tokens = self._batch.num_free_tokens
        self._num_seats_taken = self._num_swap_blocks_taken = 0
        if beside is not None:
            self.blocks.num_free_blocks -= beside.num_new_blocks
        self._limits = view.limits
        self._block_size = view.kv.block_size
        self._num_host_blocks = view.kv.num_held_host_blocks
        self._loras: set[str | None] = set()

    def count_loras(self, requests: Iterable[Request]) -> None:
        """Count the requests' adapters as used, whether or not the requests are in this step."""
        self._loras.update(request.lora_id for request in requests)

    def schedule_running(self) -> None:
        """Schedule running requests in order while tokens last; preempt from the back."""
        while self.running:
            self._schedule_decodes()
            num_new_tokens = self._chunk(self.running[0]) if self.running else 0
            if num_new_tokens == 0:
                break
            request = self.running.popleft()
            if self._make_room(request):
                self._add(request, num_new_tokens, self.running_prefills, self.running_decodes)

    def _schedule_decodes(self) -> None:
        """Schedule the plain decodes at the front of the queue."""
        decodes = self.blocks.append_to_decodes(self.running, most=max(0, self._num_free_tokens))
        for _ in decodes:
            self.running.popleft()
        self.running_decodes += decodes
        self._num_tokens.update([(request.request_id, 1) for request in decodes])
        self._loras.update([request.lora_id for request in decodes])
        self._num_free_tokens -= len(decodes)

    def resume(self, request: Request) -> None:
        """Continue a running prompt alone, with all its blocks.

        Another policy, which planned the last step, may have given them to others: floors, say.
        """
        self.running.remove(request)
        while self.blocks.num_free_blocks < 0:
            self._preempt_last(request)
        self._add(request, self._tokens_left(request), self.running_prefills, self.running_decodes)

    def schedule_swapped(self) -> None:
        """Swap requests in, in order, until one cannot come back."""
        passed_over: list[Request] = []
        while self.swapped and self.blocks.can_swap_in(self.swapped[0]):
            request = self.swapped[0]
            if not self._has_lora_slot(request):
                passed_over.append(self.swapped.popleft())
                continue
            num_swap_blocks = self._num_swap_blocks_taken + self._num_host_blocks(
                request.request_id
            )
            if num_swap_blocks > self._batch.num_free_swap_blocks:
                break
            # vLLM waits forever with a prompt that has more tokens left than a step can hold.
            n = min(self.blocks.num_left(request), self._limits.max_num_batched_tokens)
            if not self._can_schedule(n):
                break
            self.blocks.swap_in(self.swapped.popleft())
            self._add(request, n, self.swapped_prefills, self.swapped_decodes)
        self.swapped.extendleft(reversed(passed_over))

    def schedule_prefills(
        self,
        *,
        enable_chunking: bool,
        prompt_limit: float,
        may_go_on: Callable[[Step], bool],
    ) -> None:
        """Start waiting requests in order until one does not fit; reject those that never will."""
        passed_over: list[Request] = []
        while may_go_on(self) and self.waiting:
            request = self.waiting[0]
            n = self._chunk(request) if enable_chunking else self.blocks.num_left(request)
            status = self.blocks.can_allocate(request)
            is_too_long = n > prompt_limit and not request.num_output_tokens
            if is_too_long or status is AllocStatus.NEVER:
                self._batch.reject(self.waiting.popleft(), EndReason.TOO_LONG)
                continue
            if status is AllocStatus.LATER:
                break
            if not self._has_lora_slot(request):
                passed_over.append(self.waiting.popleft())
                continue
            # A prompt that vLLM would drop, or refuse to run, is computed in parts.
            n = min(n, self._limits.max_num_batched_tokens)
            if not self._can_schedule(n):
                break
            self.blocks.allocate(self.waiting.popleft())
            self.prefills.append(request)
            self._book(request, n)
        self.waiting.extendleft(reversed(passed_over))

    def preempt_for_priority(self, key: Callable[[Request], tuple[int, float]]) -> None:
        """Preempt less urgent requests for the head of the queue, then sort the queue.

        As in vLLM, the head is the one before sorting, and the next step uses the room.
        """
        self.running = deque(sorted(self.running, key=key))
        if self.waiting:
            head = self.waiting.popleft()
            while self.running and key(self.running[-1]) > key(head):
                is_allocatable = self.blocks.can_allocate(head) is AllocStatus.OK
                if is_allocatable and self._can_schedule(self.blocks.num_left(head)):
                    break
                victim = self.running.pop()
                self._preempt(victim, PreemptionMode.RECOMPUTE)
                self.waiting.appendleft(victim)
            self.waiting.appendleft(head)
        self.waiting = deque(sorted(self.waiting, key=key))

    @property
    def is_recomputing(self) -> bool:
        """Tell whether a request seen in this step recomputes output tokens after a preemption."""
        seen = (self.running, self.running_prefills, self.swapped_prefills, self.prefills)
        return any(
            r.num_preemptions and r.num_output_tokens and self.blocks.is_prefill(r)
            for r in chain.from_iterable(seen)
        )

    @property
    def has_room_to_spare(self) -> bool:
        """Tell whether `beside`'s decodes have a token each, and a block more than they fill."""
        return self._num_free_tokens >= 0 and self.blocks.num_free_blocks > 0

    def build(self) -> SchedulerOutput:
        """Return the plan, with prompts before decodes.

        With prefix caching, requests that are swapped in come first.  Their blocks are taken first,
        and content that had to be evicted for them is no longer found.
        """
        if self.blocks.caches_prefixes:
            self._enter_what_is_not_cached(self.swapped_prefills, self.swapped_decodes)
            self._enter_what_is_not_cached(self.prefills, self.running_prefills)
            self._enter_what_is_not_cached(self.running_decodes)
            return self._batch.build()
        self._enter(self.prefills, self.running_prefills, self.swapped_prefills)
        self._batch.add_preempting(self.running_decodes, victims=[])
        self._enter(self.swapped_decodes)
        assert self._batch.num_scheduled_tokens == self._num_tokens, "not all find their room"
        return self._batch.build()

    def _enter(self, *several: Iterable[Request]) -> None:
        for request in chain.from_iterable(several):
            self._batch.add(request, self._num_tokens[request.request_id])

    def _enter_what_is_not_cached(self, *several: Iterable[Request]) -> None:
        """Add requests without cached tokens; vLLM recomputes one of a fully cached chunk."""
        batch = self._batch
        for request in chain.from_iterable(several):
            table = self.blocks.tables[request.request_id]
            if request.status is RequestStatus.WAITING:
                table.num_found_tokens = request.num_tokens - batch.find(request)
            num_new_tokens = self._num_tokens[request.request_id]
            num_found = min(num_new_tokens, table.num_found_tokens)
            table.num_found_tokens -= num_found
            n = num_new_tokens - num_found
            if not (batch.add(request, n, min_new_tokens=n) if n else batch.repeat(request)):
                # It needs room that vLLM gains in this step because two blocks become equal.
                self.blocks.forget(request)

    def _make_room(self, request: Request) -> bool:
        """Preempt from the back until `request` has its slots; return False if it went itself."""
        while not self.blocks.can_append_slots(request):
            if not self.running and self._would_start_over_for_ever(request):
                return True
            if request in self._preempt_last(request):
                return False
        return True

    def _preempt_last(self, served: Request) -> list[Request]:
        """Preempt the last running request, or `served` if none is left; return who leaves."""
        victim = self.running.pop() if self.running else served
        leaving = self._group_of(victim, served)
        for each in leaving:
            self._preempt(each)
            self.victims.append(each)
        return leaving

    def _group_of(self, victim: Request, served: Request) -> list[Request]:
        """Return the victim and those that leave with it, none of which is in `running` any more.

        They are the requests that answer its prompt, too, and are not in this step yet: to vLLM all
        of them are one.  If `served` is one of them and no other request is in this step, the
        victim leaves alone, so that a group that is larger than the cache is served in turns.
        """
        group, in_step = victim.group, chain(self.running_decodes, self.running_prefills)
        if group is None:
            return [victim]
        is_own = served is not victim and served.group is group
        if is_own and all(request.group is group for request in in_step):
            return [victim]
        siblings = [request for request in self.running if request.group is group]
        self.running = deque(r for r in self.running if r.group is not group)
        return [victim, *reversed(siblings), *([served] if is_own else ())]

    def _preempt(self, victim: Request, mode: PreemptionMode | None = None) -> None:
        mode = mode or _mode_of_group(victim)
        before = self._batch.num_free_blocks
        self._batch.preempt(victim, mode)
        self.blocks.leave(victim, num_freed_blocks=self._batch.num_free_blocks - before)

    def _would_start_over_for_ever(self, request: Request) -> bool:
        """Tell whether a chunked prompt holds the whole cache, so that no block can become free."""
        blocks = self.blocks
        fills_cache = blocks.is_prefill(request) and blocks.holds_all(request)
        return fills_cache and not self._batch.would_swap_out(request, _mode_of_group(request))

    def _add(
        self, request: Request, n: int, prefills: list[Request], decodes: list[Request]
    ) -> None:
        (prefills if self.blocks.is_prefill(request) else decodes).append(request)
        self.blocks.append_slots(request)
        self._book(request, n)

    def _book(self, request: Request, num_new_tokens: int) -> None:
        self._num_tokens[request.request_id] = num_new_tokens
        self._num_free_tokens -= num_new_tokens
        if request.status is not RequestStatus.RUNNING:
            self._num_seats_taken += 1
            self._num_swap_blocks_taken += self._num_host_blocks(request.request_id)
        self._loras.add(request.lora_id)

    def _tokens_left(self, request: Request) -> int:
        return min(self.blocks.num_left(request), self._num_free_tokens)

    def _chunk(self, request: Request) -> int:
        """Return all tokens left, or those that fit; of what may be cached, whole blocks."""
        num_left, num_free = self.blocks.num_left(request), self._num_free_tokens
        if num_left <= num_free:
            return num_left
        return num_free - num_free % self._block_size if self.blocks.caches_prefixes else num_free

    def _can_schedule(self, num_new_tokens: int) -> bool:
        has_seat = self._batch.num_free_seqs > self._num_seats_taken
        return 0 < num_new_tokens <= self._num_free_tokens and has_seat

    def _has_lora_slot(self, request: Request) -> bool:
        limit, lora_id = self._limits.max_loras, request.lora_id
        if limit is None or lora_id is None or lora_id in self._loras:
            return True
        return len(self._loras - {None}) < limit


def _mode_of_group(request: Request) -> PreemptionMode | None:
    """Return SWAP for one of several answers to a prompt that have not ended, else None."""
    is_one_of_several = request.group is not None and request.group.num_unfinished > 1
    return PreemptionMode.SWAP if is_one_of_several else None
