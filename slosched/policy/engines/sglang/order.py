"""SGLang's schedule policies: the order in which waiting requests are tried."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from typing import NamedTuple

from slosched.core import Request
from slosched.kv.prefix.radix import Node, RadixTree

MAX_WAITING_FOR_PREFIXES = 128
"""The queue length above which SGLang looks up no prefixes, so that two orders become fcfs."""
IN_BATCH_PREFIX_TOKENS = 32
"""A prompt with at most this many cached tokens waits if it shares as many with an earlier one."""


class SchedulePolicy(StrEnum):
    """The order in which waiting requests are tried."""

    FCFS = "fcfs"
    LPM = "lpm"
    """The longest cached prefix comes first."""
    DFS_WEIGHT = "dfs-weight"
    """Depth first through the tree of cached prefixes, where most requests wait first."""
    HRRN = "hrrn"
    """The highest response ratio comes first: prompt tokens that were computed for others while it
    waited, divided by its own tokens that are not cached."""
    SHORTEST_PREFILL_FIRST = "shortest-prefill-first"
    """The fewest tokens that are not cached come first."""
    LOF = "lof"
    """The largest `max_tokens` comes first."""
    RANDOM = "random"


_CAPPED = (SchedulePolicy.LPM, SchedulePolicy.HRRN)
_REMEMBERING = (SchedulePolicy.HRRN, SchedulePolicy.SHORTEST_PREFILL_FIRST)


class Shuffle:
    """A shuffle that is the same in every run, since policies must be deterministic.

    Uses a linear congruential generator with Knuth's multiplier modulo 2**64 (The Art of Computer
    Programming, 3.3.4).
    """

    def __init__(self) -> None:
        self._state = 1

    def __call__(self, items: list[Request]) -> None:
        for last in range(len(items) - 1, 0, -1):
            self._state = (6364136223846793005 * self._state + 1442695040888963407) % 2**64
            chosen = (self._state >> 32) % (last + 1)
            items[last], items[chosen] = items[chosen], items[last]


class Joined(NamedTuple):
    """The moment when a request began to wait, on two clocks."""

    place: int
    """The number of requests that had joined the queue before it."""
    num_prefilled: int
    """The value of `Order.num_prefilled` at that moment."""


class Order:
    """Sorts the waiting requests, and remembers what the sorting needs."""

    def __init__(
        self, policy: SchedulePolicy, max_waiting_for_prefixes: int = MAX_WAITING_FOR_PREFIXES
    ) -> None:
        self.policy = policy
        self._max_waiting_for_prefixes = max_waiting_for_prefixes
        self.num_prefilled = 0
        """The clock of `hrrn`: tokens of all steps so far that computed prompts."""
        self._shuffle = Shuffle()
        self._num_joined = 0
        self._joined: dict[str, Joined] = {}

    def sort(self, waiting: list[Request], urgency: Callable[[Request], int] | None = None) -> None:
        """Sort in place; requests that compare equal keep their order.

        `urgency` (largest first) takes precedence over everything else, and applies only to `fcfs`
        and `lof`.
        """
        policy = self.policy
        if policy in _CAPPED and len(waiting) > self._max_waiting_for_prefixes:
            policy = SchedulePolicy.FCFS
        match policy:
            case SchedulePolicy.FCFS:
                if urgency is not None:
                    waiting.sort(key=lambda r: -urgency(r))
            case SchedulePolicy.LOF:
                waiting.sort(key=lambda r: (-urgency(r) if urgency else 0, -r.max_tokens))
            case SchedulePolicy.RANDOM:
                self._shuffle(waiting)
            case SchedulePolicy.LPM:
                _sort_by_prefix(waiting)
            case SchedulePolicy.DFS_WEIGHT:
                _sort_down_prefixes(waiting)
            case SchedulePolicy.HRRN:
                self._sort_by_response_ratio(waiting)
            case SchedulePolicy.SHORTEST_PREFILL_FIRST:
                self._sort_by_prefill(waiting)

    def follow(self, waiting: Sequence[Request]) -> None:
        """Note which requests have joined the end of the queue since the last call."""
        if self.policy not in _REMEMBERING:
            return
        joined = self._joined
        for request in waiting:
            if request.request_id not in joined:
                joined[request.request_id] = Joined(self._num_joined, self.num_prefilled)
                self._num_joined += 1
        if len(joined) > len(waiting):
            self._joined = {r.request_id: joined[r.request_id] for r in waiting}

    def leave(self, requests: Iterable[Request]) -> None:
        """Forget requests that no longer wait; one that returns to the queue joins it as new."""
        for request in requests:
            self._joined.pop(request.request_id, None)

    def chunk_limit(
        self, chunked: Request, waiting: Iterable[Request], num_left: int, page_size: int
    ) -> int | None:
        """Return how many of `num_left` tokens of a step the cut prompt may have; None for all.

        With `shortest-prefill-first`, it leaves room for waiting requests that are shorter than its
        rest.
        """
        if self.policy != SchedulePolicy.SHORTEST_PREFILL_FIRST or num_left < 2 * page_size:
            return None
        num_reserved = 0
        for request in waiting:
            work = num_to_prefill(request)
            more = num_reserved + math.ceil(work / page_size) * page_size
            if work >= chunked.num_uncomputed_tokens or more > num_left - page_size:
                break
            num_reserved = more
        if not num_reserved:
            return None
        return (num_left - num_reserved) // page_size * page_size

    def _sort_by_response_ratio(self, waiting: list[Request]) -> None:
        later = _sharing_with_earlier(waiting)

        def key(request: Request) -> tuple[float, int]:
            joined = self._joined[request.request_id]
            if request.request_id in later:
                return math.inf, joined.place
            num_known = min(request.num_computed_tokens, request.num_tokens - 1)
            num_missing = request.num_prompt_tokens - num_known
            waited = self.num_prefilled - joined.num_prefilled
            return -waited / num_missing if num_missing > 0 else -math.inf, joined.place

        waiting.sort(key=key)

    def _sort_by_prefill(self, waiting: list[Request]) -> None:
        later = _sharing_with_earlier(waiting)
        joined = self._joined
        waiting.sort(
            key=lambda r: (r.request_id in later, num_to_prefill(r), joined[r.request_id].place)
        )


def num_to_prefill(request: Request) -> int:
    """Return how many tokens of a waiting request are not cached; at least 1."""
    return max(1, request.num_uncomputed_tokens)


def _sort_by_prefix(waiting: list[Request]) -> None:
    later = _sharing_with_earlier(waiting)
    waiting.sort(
        key=lambda r: math.inf if r.request_id in later else -r.num_computed_tokens,
    )


def _sharing_with_earlier(waiting: Iterable[Request]) -> set[str]:
    """Return requests that should wait until a prefix shared with an earlier one is cached."""
    tree, later = RadixTree(), set()
    for request in waiting:
        if request.num_computed_tokens > IN_BATCH_PREFIX_TOKENS:
            continue
        tokens, size = content(request)
        num_shared = tree.match(tokens, request.lora_id).num_tokens * size
        if num_shared >= IN_BATCH_PREFIX_TOKENS:
            later.add(request.request_id)
        else:
            tree.insert(tokens, tokens, request.lora_id)
    return later


def _sort_down_prefixes(waiting: list[Request]) -> None:
    tree, ends = RadixTree(), []
    for request in waiting:
        tokens, size = content(request)
        prefix = tokens[: request.num_computed_tokens // size]
        tree.insert(prefix, prefix, request.lora_id)
        ends.append(prefix)
    for request, prefix in zip(waiting, ends, strict=True):
        tree.match(prefix, request.lora_id)  # splits nodes where a prefix ends
    nodes = [
        tree.match(prefix, request.lora_id).node
        for request, prefix in zip(waiting, ends, strict=True)
    ]
    sort_depth_first(waiting, nodes, tree)


def sort_depth_first(waiting: list[Request], nodes: Iterable[Node], tree: RadixTree) -> None:
    """Sort depth first: longer prefixes before shorter ones, heavier subtrees first.

    `nodes` are where the cached prefixes of `waiting` end in `tree`.  The weight of a subtree is
    the number of requests in it.  Of equal weights, the first to enter the tree comes first; in
    SGLang, that tree is the cache.
    """
    by_node: dict[Node, list[Request]] = {}
    for request, node in zip(waiting, nodes, strict=True):
        by_node.setdefault(node, []).append(request)
    weights = Counter({node: len(requests) for node, requests in by_node.items()})
    for node in reversed(list(tree)):
        assert node.parent is not None
        weights[node.parent] += weights[node]
    waiting[:] = _walked(tree.root, by_node, weights)


def _walked(
    root: Node, by_node: dict[Node, list[Request]], weights: Counter[Node]
) -> list[Request]:
    """Return children's requests before a node's own, heaviest first.

    It does not recurse, since prefixes may be long.
    """
    ordered: list[Request] = []
    todo = [root]
    while todo:  # builds the reverse: a node's own requests come first
        node = todo.pop()
        ordered += reversed(by_node.get(node, ()))
        todo += sorted(node.children.values(), key=lambda child: -weights[child])
    return ordered[::-1]


def content(request: Request) -> tuple[Sequence[int], int]:
    """Return what identifies the request's content, and how many tokens each element stands for.

    Requests share a prefix as far as these sequences begin alike.
    """
    if request.prompt_token_ids is not None:
        return [*request.prompt_token_ids, *request.output_token_ids], 1
    return request.prefix_hashes, request.prefix_block_tokens or 1
