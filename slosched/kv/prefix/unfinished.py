"""Blocks that requests find although the step that computes them has not ended."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Container, Iterable, Iterator

from slosched.core import Request


class Unfinished:
    """The blocks that are found but not computed yet, which matter only if a step fails."""

    def __init__(self) -> None:
        self._owner: dict[int, Request] = {}
        """Request by block that it is to compute."""
        self._planned: defaultdict[Request, deque[tuple[int, int]]] = defaultdict(deque)
        """For each request, (place in its table, block) of what it is to compute, in order."""

    @property
    def is_empty(self) -> bool:
        """Tell whether no block is yet to be computed."""
        return not self._planned

    def add(self, request: Request, first_place: int, blocks: Iterable[int]) -> None:
        """Note that `request` will compute `blocks`, the first at `first_place` of its table."""
        for place, block in enumerate(blocks, first_place):
            self._owner[block] = request
            self._planned[request].append((place, block))

    def note_computed(self, request: Request, num_full_blocks: int) -> None:
        """Note that the first blocks of its table are computed.  O(1) for each new one."""
        planned = self._planned.get(request)
        if planned is None:
            return
        while planned and planned[0][0] < num_full_blocks:
            _, block = planned.popleft()
            if self._owner.get(block) is request:
                del self._owner[block]
        if not planned:
            del self._planned[request]

    def remove(self, blocks: Iterable[int]) -> None:
        """Forget blocks that were evicted and may be given to other requests."""
        for block in blocks:
            self._owner.pop(block, None)

    def of(self, requests: Container[Request]) -> Iterator[int]:
        """Yield the blocks that `requests` are yet to compute.  O(blocks)."""
        return (block for block, owner in self._owner.items() if owner in requests)

    def note_failed(self, requests: Iterable[Request]) -> list[int]:
        """Forget `requests`, which ended with a failed step, and return all unfinished blocks."""
        for request in requests:
            self._planned.pop(request, None)
        return list(self._owner)
