"""vLLM's queues as a policy sees them: slosched requests, updated from vLLM's in every step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice
from typing import Any, NamedTuple

from vllm.v1.request import RequestStatus as Status

from slosched.core import (
    EndReason,
    LatencyModel,
    Limits,
    Request,
    RequestStatus,
    SchedulerView,
)
from slosched.integrations.vllm.kv_view import VLLMBlocks
from slosched.integrations.vllm.limits import longest_chunk
from slosched.integrations.vllm.slo import BadPromiseError, Promises
from slosched.scheduler.infeasible import eased_slo
from slosched.scheduler.queues import InOrder, Queues

_NUM_MATCHED_ANEW = 32
"""The number of waiting requests, from the front of the queue, whose prefix is looked up in every
step.  Those behind keep what was found when they arrived."""

# A look at an enum's member takes 0.1 µs in Python 3.11, and a thousand requests may wait.
_RUNNING, _WAITING = RequestStatus.RUNNING, RequestStatus.WAITING
_THEIRS_WAITING, _LOADING = Status.WAITING, Status.WAITING_FOR_REMOTE_KVS

_END_REASONS = {
    Status.FINISHED_STOPPED: EndReason.STOP,
    Status.FINISHED_REPETITION: EndReason.STOP,
    Status.FINISHED_LENGTH_CAPPED: EndReason.LENGTH,
    Status.FINISHED_ERROR: EndReason.FAULT,
}


OnEnd = Callable[[Request, Any], None]
"""A function that is called with each request that has ended, and with vLLM's own."""


def _nothing(ours: Request, theirs: Any) -> None:
    """Ignore the end."""


class _ByPriority(InOrder):
    """Those that wait in a queue by priority, in which the latest may stand anywhere."""

    __slots__ = ("_requests",)

    def __init__(self, queues: Queues, requests: dict[str, Request]) -> None:
        super().__init__(queues)
        self._requests = requests
        """Those that wait and others, by id, in the order in which they have arrived."""

    def latest_first(self) -> Iterable[Request]:
        return (self._requests[name] for name in reversed(self._requests) if name in self._queue)


class _Pair(NamedTuple):
    """A request that vLLM runs."""

    theirs: Any
    ours: Request
    num_prompt_tokens: int
    far_tokens: int
    """Computed tokens up to which the request surely has another token to compute."""


class Mirror:
    """slosched's requests, one for each of vLLM's.

    A policy sees only requests that vLLM could run now.  Hidden are those for which vLLM has
    nothing to compute: the last token is on its way (`queues.finishing`), a grammar is being
    compiled, or tokens from before a preemption are still to come.
    """

    def __init__(
        self,
        host: Any,
        kv: VLLMBlocks,
        promises: Promises,
        limits: Limits,
        per_request_s: float = 0.0,
    ) -> None:
        """Mirror the queues of `host`, which is vLLM's scheduler.

        A client sees its first token `per_request_s` later than the engine has it, so each request
        counts as sent so much earlier.
        """
        self._host = host
        self._kv = kv
        self._promises = promises
        self._limits = limits
        self._per_request_s = per_request_s
        self._requests: dict[str, Request] = {}
        self._theirs: dict[str, Any] = {}
        self._adapters: dict[str, int] = {}
        """The number of the first LoRA adapter of each name."""
        self._max_model_len: int = host.max_model_len
        self._rule = limits.deadline_rule
        self._staggers = host.vllm_config.parallel_config.pipeline_parallel_size > 1
        """Whether a decode may have to wait for a later step, as in a pipeline."""
        self._running: list[Any] = []
        """Those that ran when vLLM's queues were last read."""
        self._num_read = 0
        """The number of those that waited then."""
        self._left: set[Any] = set()
        """Those that have left vLLM's waiting queue since then: they run or have ended."""
        self._pairs: dict[Any, _Pair] = {}
        """vLLM's running requests, each with ours."""
        self._all_running: dict[str, Request] = {}
        """Ours of these by id."""
        self.decodes: Sequence[Request] = ()
        """The running requests that policies see and that have one token to compute."""
        self._shown: tuple[Request, ...] = ()
        """The running requests that policies see."""
        self.on_end: OnEnd = _nothing
        self.queues = Queues(waiting={})
        self.withheld: set[str] = set()
        """Running requests that are hidden in this step: their blocks are wanted for others, but
        cannot be freed yet."""
        self.crowded_out: set[str] = set()
        """Requests that are hidden in this step: vLLM's encoder had no room for their images."""
        self.refused: dict[str, str] = {}
        """Requests whose SLO cannot be read, with the reason; the caller has to end them."""

    @property
    def limits(self) -> Limits:
        """Return the next step's limits, less the seats of hidden requests, but with one seat."""
        limits, num_seats = self._limits, self.num_seats
        if limits.max_chunk_tokens is not None:
            limits = replace(limits, max_chunk_tokens=longest_chunk(self._host))
        if num_seats == limits.max_num_seqs:
            return limits
        return replace(limits, max_num_seqs=max(1, num_seats))

    @property
    def num_seats(self) -> int:
        """Return the seats for requests that are shown or could start; it may be 0."""
        num_hidden = len(self.queues.finishing) + self._host.num_waiting_for_streaming_input
        return int(self._limits.max_num_seqs - num_hidden)

    def view(self, begins_s: float, model: LatencyModel | None) -> SchedulerView:
        return SchedulerView(
            now_s=begins_s,
            waiting=self._waiting(),
            running=self._shown,
            swapped=(),
            kv=self._kv,
            limits=self.limits,
            latency_model=model,
            num_finishing=len(self.queues.finishing),
        )

    def _waiting(self) -> InOrder:
        if isinstance(self._host.waiting, deque):
            return InOrder(self.queues)
        return _ByPriority(self.queues, self._requests)

    def refresh(self, begins_s: float) -> None:
        """Read vLLM's queues, in O(requests).

        Tokens that are on their way count as emitted at `begins_s`, when the next step begins.
        """
        is_same = self._host.running == self._running
        if not is_same:
            self._read_running()
        hidden = self.withheld | self.crowded_out
        finishing = {name: self._all_running[name] for name in hidden if name in self._all_running}
        foreseen: list[Request] = []
        decodes: list[Request] = []
        staggers, next_step = self._staggers, self._host.current_step + 1
        # A call for each of hundreds of decodes would take its time, and so would a second look.
        for theirs, ours, num_prompt, far_tokens in self._pairs.values():
            computed = ours.num_computed_tokens = theirs.num_computed_tokens
            num_placeholders, num_emitted = theirs.num_output_placeholders, ours.num_output_tokens
            if num_placeholders == 1 and not ours.num_output_placeholders:  # nearly always
                num_emitted += 1
                ours.token_times_s.append(begins_s)
                ours.num_output_tokens = num_emitted
                ours.num_output_placeholders = 1
                foreseen.append(ours)
            elif num_placeholders or ours.num_output_placeholders:
                self._foresee(ours, num_placeholders, begins_s)
                num_emitted = ours.num_output_tokens
            num_left = num_prompt + num_emitted - computed
            # nearly always; no other rule needs a look
            has_more = (
                num_left > 0
                and computed < far_tokens
                and not (staggers and theirs.next_decode_eligible_step > next_step)
            )
            if not has_more and self._has_nothing_to_compute(theirs):
                finishing[ours.request_id] = ours
            elif num_left == 1:
                decodes.append(ours)
        self._rule.set_deadlines(foreseen)
        if not is_same or finishing or self.queues.finishing:
            self._show_all_but(finishing)
        if hidden:
            decodes = [ours for ours in decodes if ours.request_id not in finishing]
        self.decodes = decodes
        self._read_waiting(begins_s)

    def note_tokens(self, request_ids: Iterable[str], now_s: float) -> None:
        """Stamp the tokens that may have come out for these requests.

        If more are on their way, `refresh` sets the deadline of the token after those.
        """
        requests, theirs_of = self._requests, self._theirs
        stamped: list[Request] = []
        for request_id in request_ids:
            ours = requests.get(request_id)
            if ours is None:
                continue
            theirs = theirs_of[request_id]
            num_tokens, num_expected = theirs.num_output_tokens, ours.num_output_placeholders
            num_more = num_tokens - ours.num_output_tokens
            if num_expected == 1 and not num_more:  # nearly always, if vLLM plans ahead
                ours.token_times_s[-1] = now_s
                ours.num_output_placeholders = 0
            elif num_more == 1 and not num_expected:  # nearly always, if it does not
                ours.token_times_s.append(now_s)
                ours.num_output_tokens = num_tokens
            elif num_expected or num_more:
                times = ours.token_times_s
                del times[ours.num_output_tokens - num_expected :]
                times += [now_s] * (num_tokens - len(times))
                ours.num_output_tokens, ours.num_output_placeholders = num_tokens, 0
            else:
                continue  # a chunk that was not the last of its prompt
            if not theirs.num_output_placeholders:
                stamped.append(ours)
        self._rule.set_deadlines(stamped)

    def note_ends(
        self, request_ids: Iterable[str], now_s: float, reason: EndReason | None = None
    ) -> None:
        """Mark these requests as ended, for `reason` or else for the reason that vLLM gives.

        Policies that still hold the requests see the end.
        """
        for request_id in request_ids:
            self.refused.pop(request_id, None)
            self._kv.forget(request_id)
            theirs, ours = self._theirs.pop(request_id, None), self._requests.pop(request_id, None)
            if ours is not None and theirs is not None:
                self._unpair(theirs)
                if ours.status is _WAITING:
                    self._left.add(theirs)
                if ours.num_output_placeholders:
                    self._foresee(ours, 0, now_s)
                ours.end_reason = reason or _END_REASONS.get(theirs.status, EndReason.CLIENT)
                ours.status = ours.end_reason.status
                ours.end_s = now_s
                self.on_end(ours, theirs)

    def ease(self, request_id: str, reason: EndReason) -> bool:
        """Give a request that a plan rejects another SLO, if it is to be served all the same.

        Returns False if it is not.
        """
        ours = self._requests[request_id]
        slo = eased_slo(ours, reason)
        if slo is None:
            return False
        ours.asked_slo = ours.asked_slo or ours.slo
        ours.slo = slo
        ours.deadline_s = self._rule.next_deadline_s(ours)
        return True

    def _read_running(self) -> None:
        """Pair the requests that vLLM runs now with ours."""
        running, pairs = list(self._host.running), self._pairs
        self._running = running
        for theirs in pairs.keys() - set(running):
            self._unpair(theirs)
        # The others stand in the same order as before, and what has begun behind them.
        for theirs in running[len(pairs) :]:
            self._pair(theirs)
        if list(pairs) != running:
            for theirs in [*pairs]:
                self._unpair(theirs)
            for theirs in running:
                self._pair(theirs)

    def _pair(self, theirs: Any) -> None:
        """Pair a request that vLLM runs with ours, if it was not refused."""
        ours = self._find(theirs)
        if ours is None:
            return
        if ours.status is not _RUNNING:
            ours.status = _RUNNING
            self._left.add(theirs)
            if not ours.num_preemptions:  # what was found of it while it waited
                ours.num_cached_tokens = ours.num_computed_tokens
        most_tokens = ours.num_prompt_tokens + ours.max_tokens
        self._pairs[theirs] = _Pair(theirs, ours, ours.num_prompt_tokens, most_tokens - 2)
        self._all_running[ours.request_id] = ours

    def _unpair(self, theirs: Any) -> None:
        """Forget the pair of a request that vLLM runs no longer, if it has one."""
        if (pair := self._pairs.pop(theirs, None)) is not None:
            del self._all_running[pair.ours.request_id]

    def _show_all_but(self, finishing: dict[str, Request]) -> None:
        """Put all requests that vLLM runs into their queues: `finishing`, and all others."""
        running = self._all_running.copy()
        for request_id in finishing:
            del running[request_id]
        self.queues.running, self.queues.finishing = running, finishing
        self._shown = tuple(running.values())

    def _find(self, theirs: Any) -> Request | None:
        ours = self._requests.get(theirs.request_id)
        if ours is None and theirs.request_id not in self.refused:
            try:
                ours = self._requests[theirs.request_id] = self._made(theirs)
                self._theirs[theirs.request_id] = theirs
            except BadPromiseError as error:
                self.refused[theirs.request_id] = str(error)
        return ours

    def _made(self, theirs: Any) -> Request:
        extra_args = theirs.sampling_params.extra_args
        ours = Request(
            theirs.request_id,
            theirs.arrival_time - self._per_request_s,
            theirs.num_prompt_tokens,
            max_tokens=max(
                1, min(theirs.max_tokens, self._max_model_len - theirs.num_prompt_tokens)
            ),
            slo=self._promises.of(extra_args),
            tier=self._promises.tier_of(extra_args),
            tenant=self._promises.tenant_of(extra_args),
            on_infeasible=self._promises.when_infeasible(extra_args),
            prompt_token_ids=theirs.prompt_token_ids,
            priority=theirs.priority,
            lora_id=self._adapter_of(theirs.lora_request),
            server_s=self._per_request_s,
        )
        ours.deadline_s = self._rule.next_deadline_s(ours)
        return ours

    def _adapter_of(self, lora: Any) -> str | None:
        """Return the adapter's name, with its number if another one had that name before.

        vLLM counts adapters by number, and one that is loaded anew gets another number.
        """
        if lora is None:
            return None
        name, number = str(lora.lora_name), lora.lora_int_id
        is_first = self._adapters.setdefault(name, number) == number
        return name if is_first else f"{name}#{number}"

    def _foresee(self, ours: Request, num_placeholders: int, begins_s: float) -> None:
        """Count `num_placeholders` tokens that are on their way as emitted at `begins_s`."""
        num_known = ours.num_output_tokens - ours.num_output_placeholders
        ours.token_times_s[num_known:] = [begins_s] * num_placeholders
        ours.num_output_tokens = num_known + num_placeholders
        ours.num_output_placeholders = num_placeholders
        ours.deadline_s = self._rule.next_deadline_s(ours)

    def _has_nothing_to_compute(self, theirs: Any) -> bool:
        """Tell whether vLLM would skip this running request, by its own rules."""
        computed, placeholders = theirs.num_computed_tokens, theirs.num_output_placeholders
        if placeholders and computed + 2 - placeholders >= (
            theirs.num_prompt_tokens + theirs.max_tokens
        ):
            return True
        return bool(
            theirs.num_tokens_with_spec + placeholders <= computed
            or computed + 1 >= self._max_model_len
            or self._host.current_step + 1 < theirs.next_decode_eligible_step
        )

    def _read_waiting(self, begins_s: float) -> None:
        queue = self._host.waiting
        # vLLM turns to those that hold blocks first: what a connector has loaded, and sessions.  A
        # queue by priority has no places.
        holding = self._host.kv_holding_waiting
        if holding or self._host.connector is not None or not isinstance(queue, deque):
            queue = [*holding, *queue]
        new = self._new_in(queue)
        if new is None:
            before, shown = self.queues.waiting, self._shown_of(queue, begins_s)
            self.queues.waiting = shown
            come = [ours for request_id, ours in shown.items() if request_id not in before]
        else:  # often none, and the queue may be long
            shown = self._shown_of(new, begins_s)
            self.queues.waiting.update(shown)
            come = list(shown.values())
        for ours in come:
            self.queues.index.note(ours)
        self._num_read = len(queue)
        if self._kv.caches_prefixes:
            self._match(shown)
        for request_id in self.crowded_out:
            self.queues.waiting.pop(request_id, None)

    def _new_in(self, queue: Sequence[Any]) -> list[Any] | None:
        """Return what was appended to vLLM's queue, after taking out of the view what has left it.

        Returns None if all have to be read anew, since some are hidden, came back to the front, or
        went in between.  To look at each of thousands that still wait would take its time.
        """
        waiting, num_read, left = self.queues.waiting, self._num_read, self._left
        self._left = set()
        # Those that are hidden may be about to change, and so what a KV connector has loaded.
        if len(waiting) != num_read or (left and self._host.connector is not None):
            return None
        for theirs in left:
            waiting.pop(theirs.request_id, None)
        new: list[Any] = []
        for theirs in reversed(queue):
            if theirs.request_id in waiting:
                break
            new.append(theirs)
        new.reverse()
        if len(waiting) + len(new) != len(queue):
            return None
        if waiting and next(iter(waiting)) != queue[0].request_id:
            return None
        return new

    def _shown_of(self, theirs_now: Iterable[Any], begins_s: float) -> dict[str, Request]:
        """Return the requests of vLLM's queue that it would start."""
        known, shown = self._requests, dict[str, Request]()
        for theirs in theirs_now:
            if theirs.status is not _THEIRS_WAITING and not self._is_ready(theirs):
                continue
            ours = known.get(theirs.request_id) or self._find(theirs)
            if ours is None:
                continue
            shown[theirs.request_id] = ours
            if ours.status is not _WAITING:
                self._read_preempted(ours, theirs, begins_s)
            if theirs.num_computed_tokens:  # loaded; the last token is always computed
                ours.num_computed_tokens = min(theirs.num_computed_tokens, theirs.num_tokens - 1)
            elif theirs.status is _LOADING:  # its load failed
                ours.num_computed_tokens = 0
        return shown

    def _match(self, new: Mapping[str, Request]) -> None:
        """Look up cached tokens of the next requests, and of `new` ones."""
        front = dict(islice(self.queues.waiting.items(), _NUM_MATCHED_ANEW))
        for request_id, ours in chain(front.items(), new.items()):
            if request_id in front or not self._kv.has_matched(request_id):
                theirs = self._theirs[request_id]
                if not theirs.num_computed_tokens:
                    ours.num_computed_tokens = self._kv.match(theirs)

    def _is_ready(self, theirs: Any) -> bool:
        """Tell whether vLLM would start this waiting request; may mark its grammar as ready."""
        if theirs.status is _LOADING:
            return theirs.request_id in self._host.finished_recving_kv_req_ids
        if not self._host._handle_blocked_waiting_request(theirs):
            return False
        return theirs.drop_stale_output or not theirs.num_stale_output_tokens

    def _read_preempted(self, ours: Request, theirs: Any, begins_s: float) -> None:
        self._kv.forget(ours.request_id)
        self._foresee(ours, theirs.num_output_placeholders, begins_s)
        ours.status = RequestStatus.WAITING
        ours.num_computed_tokens = theirs.num_computed_tokens
        ours.num_preemptions = theirs.num_preemptions
