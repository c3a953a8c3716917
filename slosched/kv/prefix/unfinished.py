"""Blocks that others find already although the step that computes them is yet to run, or runs."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Container, Iterable, Iterator

from slosched.core import Request


class Unfinished:
    """Steps run in the order in which they are planned: only if one fails does it matter."""

    def __init__(self) -> None:
        self._owner: dict[int, Request] = {}
        """By block, who is to compute it."""
        self._planned: defaultdict[Request, deque[tuple[int, int]]] = defaultdict(deque)
        """(Place in its table, block) of each that somebody is to compute, in order."""

    @property
    def is_empty(self) -> bool:
        """Tell whether no block is yet to be computed."""
        return not self._planned

    def add(self, request: Request, first_place: int, blocks: Iterable[int]) -> None:
        """`request` computes these blocks, the first of which has this place in its table."""
        for place, block in enumerate(blocks, first_place):
            self._owner[block] = request
            self._planned[request].append((place, block))

    def note_computed(self, request: Request, num_full_blocks: int) -> None:
        """So many blocks of its table are computed; O(1) for each that was not before."""
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
        """They were left and evicted, and belong to whoever takes them."""
        for block in blocks:
            self._owner.pop(block, None)

    def of(self, requests: Container[Request]) -> Iterator[int]:
        """The blocks that these are yet to compute.  O(blocks)."""
        return (block for block, owner in self._owner.items() if owner in requests)

    def note_failed(self, requests: Iterable[Request]) -> list[int]:
        """A step of these has failed, and they have ended; all blocks that are unfinished."""
        for request in requests:
            self._planned.pop(request, None)
        return list(self._owner)
