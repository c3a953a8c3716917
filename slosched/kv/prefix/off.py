"""The prefix cache of a KV cache that has none, and the methods that every prefix cache has."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Protocol

from slosched.core import BlockCopy, BlockLedger, Request, ScheduledChunk
from slosched.kv.ledger import OwnBlocks
from slosched.kv.pool import BlockPool


class Evictable(Protocol):
    """The part of a prefix index that a KV cache uses."""

    @property
    def num_evictable(self) -> int:
        """Return the number of blocks that hold cached content and no request holds.

        They count as free.
        """

    def blocks(self) -> Mapping[int, int]:
        """Return every block of known content, with the number of requests that hold it."""


class NoIndex:
    """The index of a KV cache in which the content of no block is known."""

    num_evictable = 0

    def blocks(self) -> Mapping[int, int]:
        return {}


class NoPrefixCache:
    """The prefix cache of a KV cache that has none: every block belongs to one request.

    It is also the base of `PrefixCache`: its methods are all that the KV cache and the scheduler
    ask of a prefix cache, so that neither has to know whether there is one.
    """

    copies_to_host = False
    """Whether blocks that are taken may be copied to host memory first."""

    def __init__(self, pool: BlockPool, tables: dict[str, list[int]]) -> None:
        """Begin with the device blocks and the block tables of the KV cache."""
        self._pool = pool
        self._tables = tables
        self.index: Evictable = NoIndex()
        """The blocks whose content is known."""

    # What the KV cache asks.

    def take(self, count: int) -> list[int]:
        """Return `count` device blocks for a request.

        Empty blocks are taken first, then those that were left longest ago.  Raise OutOfBlocksError
        and take nothing if there are not enough.
        """
        return self._pool.take(count)

    def ledger(self) -> BlockLedger:
        """Return the account of what a plan in the making does to the free blocks."""
        return OwnBlocks(self._tables)

    def leave(self, request_id: str, table: Sequence[int], *, at_end: bool) -> Sequence[int]:  # noqa: ARG002
        """Return the blocks of `table`, which a request gives up, that were its own.

        `at_end` tells whether the request has ended.
        """
        return table

    def note_swapped_out(self, request_id: str) -> None:
        """Note that a request has moved to the host."""

    def may_share(self, request_id: str) -> bool:  # noqa: ARG002
        """Tell whether another request may hold, or come to hold, the request's blocks."""
        return False

    def forget(self, request_id: str) -> None:
        """Forget a request that has ended and left its blocks; what it computed stays cached."""

    def check(self) -> None:
        """Raise KVCorruptionError unless the blocks in host memory add up."""

    # What the scheduler says, in the order of a request's life.

    def watch(self, request: Request) -> None:
        """Follow, while `request` waits, how many of its tokens are cached: see `refresh`."""

    def refresh(self) -> Iterable[tuple[str, int]]:
        """Return watched requests with their cached tokens, where these may have changed."""
        return ()

    def start(self, request_id: str, num_tokens: int | None = None) -> None:
        """Give a waiting or swapped request the blocks that are cached of it.

        Given `num_tokens`, these are the tokens that the plan has found at its turn.
        """

    def start_all(self, request_ids: Iterable[str]) -> None:
        """`start` requests, and take device blocks for what they find in host memory."""

    def note_planned(self, chunks: Iterable[ScheduledChunk]) -> None:
        """Note that a step will compute `chunks`, before those that are planned from now on."""

    def note_computed(self, chunks: Sequence[ScheduledChunk]) -> None:
        """Note that the tokens of `chunks` have been computed: full blocks may now be found."""

    def settle_ends(self) -> None:
        """Let the requests that ended in a step count as having left in the order they started."""

    def take_copies(self) -> tuple[Sequence[BlockCopy], Sequence[BlockCopy]]:
        """Return what the next step has to copy to host memory, and then from it."""
        return (), ()

    def counting_on(self, requests: Container[Request]) -> Sequence[str]:  # noqa: ARG002
        """Return the requests that count on what unfinished steps of `requests` compute or copy."""
        return ()

    def drop_unheld(self) -> None:
        """Forget every cached block on the device that no request holds."""

    def flush(self) -> None:
        """Forget every cached block that no request holds, on the device and on the host.

        Only between two steps, as copies that are still to be made are forgotten, too.
        """

    def on_failed_step(self, requests: Iterable[Request]) -> None:
        """Make unfindable what a failed step of `requests` left behind, and what is on the host.

        All requests that were `counting_on` it must have ended.
        """
