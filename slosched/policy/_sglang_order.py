"""SGLang's schedule policies: the order in which waiting requests are tried."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum

from slosched.core import Request
from slosched.kv.radix import Node, RadixTree

MAX_WAITING_FOR_PREFIXES = 128
"""Above this many, looking for prefixes takes too long, and the order is that of arrival."""
IN_BATCH_PREFIX_TOKENS = 32
"""A prompt of which no more is cached waits for an earlier one with which it shares as many."""


class SchedulePolicy(StrEnum):
    """Who is tried first."""

    FCFS = "fcfs"
    LPM = "lpm"
    """The longest cached prefix."""
    DFS_WEIGHT = "dfs-weight"
    """By walking down the cached prefixes, where most requests wait first."""
    LOF = "lof"
    """The largest `max_tokens`."""
    RANDOM = "random"


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


def sort(
    waiting: list[Request],
    policy: SchedulePolicy,
    urgency: Callable[[Request], int] | None,
    shuffle: Shuffle,
) -> None:
    """Sort in place; what compares equal stays in the order in which it stood.

    `urgency`, the largest first, comes before all else and goes with `fcfs` and `lof` alone.
    """
    if policy is SchedulePolicy.RANDOM:
        shuffle(waiting)
    elif policy is SchedulePolicy.LOF:
        waiting.sort(key=lambda r: (-urgency(r) if urgency else 0, -r.max_tokens))
    elif policy is SchedulePolicy.FCFS:
        if urgency is not None:
            waiting.sort(key=lambda r: -urgency(r))
    elif len(waiting) <= MAX_WAITING_FOR_PREFIXES:
        if policy is SchedulePolicy.LPM:
            _sort_by_prefix(waiting)
        else:
            _sort_down_prefixes(waiting)


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
