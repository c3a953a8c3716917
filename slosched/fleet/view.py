"""What a router sees of a replica: counts of what was sent and what has ended, and forecasts."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from heapq import heappop, heappush
from typing import NamedTuple

from slosched.core import BatchShape, EndReason, PromptOrder, Request
from slosched.kv import PrefixCaching
from slosched.perfmodel import FittedModel
from slosched.perfmodel.device import num_devices
from slosched.simulator.simulate import SimulatedReplica, SimulationConfig
from slosched.simulator.simulated import VirtualClock


class ReplicaKind(NamedTuple):
    """The latency model of a replica's device, its limits and its KV cache."""

    model: FittedModel
    config: SimulationConfig

    @property
    def num_gpus(self) -> int:
        """Return the devices that one replica holds."""
        return num_devices(self.model)


class _Prompt(NamedTuple):
    """What is left of a prompt."""

    num_tokens: int
    prefill_s: float
    """The time of its prefill alone on the device."""
    due_s: float

    def goes_before(self, new: _Prompt, order: PromptOrder) -> bool:
        """Tell whether it is expected to run before a prompt that comes after it."""
        is_shorter, is_sooner = self.prefill_s <= new.prefill_s, self.due_s <= new.due_s
        match order:
            case PromptOrder.LENGTH:
                return is_shorter
            case PromptOrder.DEADLINE:
                return is_sooner
            case PromptOrder.PUNCTUAL:
                return is_shorter and is_sooner
            case PromptOrder.ARRIVAL:
                return True


class ReplicaView:
    """A replica as its router sees it, `delay_s` late.

    The replica is simulated only as far as someone looks at it.  A step that is still running at
    that time has been simulated to its end, but none of its results is shown.
    """

    def __init__(
        self,
        index: int,
        kind: ReplicaKind,
        simulated: SimulatedReplica,
        clock: VirtualClock,
        delay_s: float,
    ) -> None:
        self.index = index
        """Its place in the fleet."""
        self.kind = kind
        """Its latency model, limits and KV cache."""
        self.simulated = simulated
        self._clock = clock
        self._delay_s = delay_s
        self._changes_s = -math.inf
        """The time before which its counts stay as they are."""
        self._sent: deque[tuple[float, Request]] = deque()
        """Requests that were sent to it after the time that is seen."""
        self._ended: list[tuple[float, str, Request]] = []
        """Heap of the requests that end after the time that is seen."""
        self._num_requests = self._num_prompt_tokens = 0
        self._prompts: dict[str, tuple[Request, float]] = {}
        """Requests without a first token, and the time of their whole prefills on the device."""

    def __repr__(self) -> str:
        return f"replica {self.index}"

    @property
    def caches_prefixes(self) -> bool:
        """Tell whether it has a prefix cache."""
        return self.kind.config.prefix_cache is not PrefixCaching.OFF

    @property
    def kv_tokens(self) -> int:
        """Return the tokens that its KV cache can hold."""
        return self.kind.config.kv_tokens

    @property
    def num_requests(self) -> int:
        """Return the requests that were sent to it and have not ended."""
        self._look()
        return self._num_requests

    @property
    def num_prompt_tokens(self) -> int:
        """Return the prompt tokens of all requests that were sent to it and have not ended."""
        self._look()
        return self._num_prompt_tokens

    @property
    def num_waiting_tokens(self) -> int:
        """Return the prompt tokens that are left to prefill.  O(prompts)."""
        self._look()
        return sum([prompt.num_tokens for prompt in self._unfinished_prompts()])

    @property
    def num_waiting(self) -> int:
        """Return the requests that still have no first token when the running step ends."""
        self._look()
        return len(list(self._unfinished_prompts()))

    @property
    def kv_use(self) -> float:
        """Return the share of its KV blocks that is in use when the step ends that is seen to run.

        Blocks that only a prefix cache holds count as free.
        """
        self._look()
        return self.simulated.scheduler.kv.used_fraction

    @property
    def is_idle(self) -> bool:
        """Tell whether all that it was sent has ended by now, however late other figures are."""
        now_s = self._clock.now_s()
        self._simulate(now_s)
        return self.simulated.known_until_s == math.inf and self.idle_from_s() <= now_s

    def idle_from_s(self) -> float:
        """Return the end of the last step that was simulated."""
        return self.simulated.clock.now_s()

    def fits(self, request: Request) -> bool:
        """Tell whether its KV cache can hold the request's prompt and longest output."""
        return request.num_prompt_tokens + request.max_tokens <= self.kind.config.kv_tokens

    def prefill_s(self, request: Request, num_cached_tokens: int = 0) -> float:
        """Return the time that the request's prefill takes alone on this device."""
        num_left = max(1, request.num_prompt_tokens - num_cached_tokens)
        return self.kind.model.predict_prefill(num_left, request.num_prompt_tokens - num_left)

    def expected_tpot_s(self) -> float:
        """Return the time of a step in which all its requests and one more are decodes."""
        self._look()
        return self.kind.model.predict(self._decodes(1 + self._num_requests))

    def expected_ttft_s(self, request: Request, num_cached_tokens: int = 0) -> float:
        """Return the time to the request's first token if it were sent now.  O(prompts).

        It is the rest of the running step, the prefills of the prompts that the replica's policy
        serves first, and its own, each as long as alone on the device.  Every step of these also
        computes a token of each decode, which takes longer by as much as the latency model says.
        """
        self._look()
        num_tokens = max(1, request.num_prompt_tokens - num_cached_tokens)
        own_s = self.prefill_s(request, num_cached_tokens)
        own = _Prompt(num_tokens, own_s, request.arrival_s + request.slo.ttft_s)
        order = self.simulated.scheduler.policy.prompt_order
        work_s, num_prompts = own_s, 0
        for prompt in self._unfinished_prompts():
            num_prompts += 1
            if prompt.goes_before(own, order):
                num_tokens += prompt.num_tokens
                work_s += prompt.prefill_s
        wait_s = max(0.0, self.simulated.clock.now_s() - self._clock.now_s())
        budget = self.kind.config.limits.max_num_batched_tokens
        num_steps = -(-num_tokens // budget)
        return (
            wait_s
            + work_s
            + num_steps * self._beside_s(min(num_tokens, budget), self._num_requests - num_prompts)
        )

    def send(self, request: Request) -> None:
        """Send it a request; only the fleet does this."""
        self.simulated.add(request, self._clock.now_s())
        self._note_sent(request)

    def fail(self) -> list[Request]:
        """Let it fail now; return the requests that it loses."""
        now_s = self._clock.now_s()
        lost = self.simulated.fail(now_s)
        lost += [request for _, _, request in self._ended if request.end_reason is EndReason.FAULT]
        return lost + [r for r in self.simulated.ended if r.end_reason is EndReason.FAULT]

    def _note_sent(self, request: Request) -> None:
        now_s = self._clock.now_s()
        self._sent.append((now_s, request))
        self._changes_s = min(self._changes_s, now_s)

    def _take_ended(self) -> list[Request]:
        """Return the requests that have ended in what was simulated, each once."""
        ended = self.simulated.ended.copy()
        self.simulated.ended.clear()
        for request in ended:
            assert request.end_s is not None
            heappush(self._ended, (request.end_s, request.request_id, request))
        return ended

    def _simulate(self, until_s: float) -> None:
        """Simulate all steps that begin before `until_s`."""
        self.simulated.run(until_s)
        self._take_ended()

    def _look(self) -> None:
        """Count what was sent and what has ended by the time that is seen."""
        seen_s = self._clock.now_s() - self._delay_s
        if seen_s < self._changes_s:
            return
        self._simulate(seen_s)
        sent, ended = self._sent, self._ended
        while sent and sent[0][0] <= seen_s:
            _, request = sent.popleft()
            self._num_requests += 1
            self._num_prompt_tokens += request.num_prompt_tokens
            self._prompts[request.request_id] = request, self.prefill_s(request)
        while ended and ended[0][0] <= seen_s:
            _, request_id, request = heappop(ended)
            self._num_requests -= 1
            self._num_prompt_tokens -= request.num_prompt_tokens
            self._prompts.pop(request_id, None)
        self._changes_s = min(
            self.simulated.known_until_s,
            sent[0][0] if sent else math.inf,
            ended[0][0] if ended else math.inf,
        )

    def _unfinished_prompts(self) -> Iterator[_Prompt]:
        """Yield what is left of each prompt."""
        emitted = [
            name
            for name, (request, _) in self._prompts.items()
            if request.num_output_tokens or request.status.is_ended
        ]
        for name in emitted:
            del self._prompts[name]
        for request, work_s in self._prompts.values():
            left = request.num_uncomputed_tokens
            left_s = work_s * left / request.num_prompt_tokens
            yield _Prompt(left, left_s, request.arrival_s + request.slo.ttft_s)

    def _decodes(self, num: int) -> BatchShape:
        """Return a step of `num` decodes whose contexts are prompts of the mean length."""
        shape = BatchShape()
        if num > 0:
            mean = self._num_prompt_tokens // max(1, self._num_requests)
            shape.num_decodes = num
            shape.decode_context_tokens = num * (mean + 1)
            shape.max_decode_context_tokens = shape.max_context_tokens = mean + 1
        return shape

    def _beside_s(self, chunk_tokens: int, num_decodes: int) -> float:
        """Return by how much `num_decodes` decodes make a step with a chunk longer."""
        if num_decodes <= 0:
            return 0.0
        alone, beside = BatchShape(), self._decodes(num_decodes)
        alone.add(chunk_tokens, 0)
        beside.add(chunk_tokens, 0)
        return self.kind.model.predict(beside) - self.kind.model.predict(alone)
