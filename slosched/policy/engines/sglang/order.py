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
"""Above this many, looking for prefixes takes SGLang too long, and two orders give way to fcfs."""
IN_BATCH_PREFIX_TOKENS = 32
"""A prompt of which no more is cached waits for an earlier one with which it shares as many."""


class SchedulePolicy(StrEnum):
    """Who is tried first."""

    FCFS = "fcfs"
    LPM = "lpm"
    """The longest cached prefix."""
    DFS_WEIGHT = "dfs-weight"
    """By walking down the cached prefixes, where most requests wait first."""
    HRRN = "hrrn"
    """The highest response ratio: what others computed of their prompts while it waited, as a
    multiple of what is not cached of its own."""
    SHORTEST_PREFILL_FIRST = "shortest-prefill-first"
    """The fewest tokens that are not cached."""
    LOF = "lof"
    """The largest `max_tokens`."""
    RANDOM = "random"


_CAPPED = (SchedulePolicy.LPM, SchedulePolicy.HRRN)
_REMEMBERING = (SchedulePolicy.HRRN, SchedulePolicy.SHORTEST_PREFILL_FIRST)


class Shuffle:
    """The same disorder in every run: a policy knows no chance.

    Numbers by Knuth's multiplier modulo 2**64 (The Art of Computer Programming, 3.3.4).
    """

    def __init__(self) -> None:
        self._state = 1

    def __call__(self, items: list[Request]) -> None:
        for last in range(len(items) - 1, 0, -1):
            self._state = (6364136223846793005 * self._state + 1442695040888963407) % 2**64
            chosen = (self._state >> 32) % (last + 1)
            items[last], items[chosen] = items[chosen], items[last]


class Joined(NamedTuple):
    """When a request began to wait, by two clocks."""

    place: int
    """The how-manieth it was."""
    num_prefilled: int
    """What `Order.num_prefilled` was then."""


class Order:
    """Sorts those that wait, and remembers what that takes."""

    def __init__(
        self, policy: SchedulePolicy, max_waiting_for_prefixes: int = MAX_WAITING_FOR_PREFIXES
    ) -> None:
        self.policy = policy
        self._max_waiting_for_prefixes = max_waiting_for_prefixes
        self.num_prefilled = 0
        """The clock of `hrrn`: tokens of all steps that computed prompts so far."""
        self._shuffle = Shuffle()
        self._num_joined = 0
        self._joined: dict[str, Joined] = {}

    def sort(self, waiting: list[Request], urgency: Callable[[Request], int] | None = None) -> None:
        """Sort in place; what compares equal stays in the order in which it stood.

        `urgency`, the largest first, comes before all else and goes with `fcfs` and `lof` alone.
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
        """Note who has joined the queue since the last time, at its end."""
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
        """They wait no longer; whoever comes back to the queue joins it anew."""
        for request in requests:
            self._joined.pop(request.request_id, None)

    def chunk_limit(
        self, chunked: Request, waiting: Iterable[Request], num_left: int, page_size: int
    ) -> int | None:
        """How many of the `num_left` tokens of a step the prompt that was cut may have, if not all.

        With `shortest-prefill-first` it leaves room to waiting ones that are shorter than its rest.
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
    """Tokens of a waiting request that are not cached."""
    return max(1, request.num_uncomputed_tokens)


def _sort_by_prefix(waiting: list[Request]) -> None:
    later = _sharing_with_earlier(waiting)
    waiting.sort(
        key=lambda r: math.inf if r.request_id in later else -r.num_computed_tokens,
    )


def _sharing_with_earlier(waiting: Iterable[Request]) -> set[str]:
    """Who had better wait until the prefix that it shares with an earlier one is cached."""
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
        tree.match(prefix, request.lora_id)  # splits where a prefix ends
    nodes = [
        tree.match(prefix, request.lora_id).node
        for request, prefix in zip(waiting, ends, strict=True)
    ]
    sort_depth_first(waiting, nodes, tree)


def sort_depth_first(waiting: list[Request], nodes: Iterable[Node], tree: RadixTree) -> None:
    """Of each prefix those that have a longer one first, the most of them before all.

    `nodes` are where their cached prefixes end in `tree`.  Of equal weight is first whichever came
    first into the tree; in SGLang that is the cache.
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
    """Children before the node's own, the heaviest first; no recursion: prefixes may be long."""
    ordered: list[Request] = []
    todo = [root]
    while todo:  # backwards: a node's own last, the lightest child before
        node = todo.pop()
        ordered += reversed(by_node.get(node, ()))
        todo += sorted(node.children.values(), key=lambda child: -weights[child])
    return ordered[::-1]


def content(request: Request) -> tuple[Sequence[int], int]:
    """What it has in common with others is what these begin with; tokens that each stands for."""
    if request.prompt_token_ids is not None:
        return [*request.prompt_token_ids, *request.output_token_ids], 1
    return request.prefix_hashes, request.prefix_block_tokens or 1
