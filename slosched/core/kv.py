"""The KV cache as a policy sees it, and what a plan would do to its free blocks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class KVView(Protocol):
    """The counts of the KV cache, without tensors and without a way to change anything."""

    @property
    def block_size(self) -> int:
        """Return the number of tokens in one KV block."""

    @property
    def num_blocks(self) -> int:
        """Return the number of KV blocks on the device."""

    @property
    def num_free_blocks(self) -> int:
        """Return the number of device blocks that can be taken, cached ones included."""

    @property
    def num_free_host_blocks(self) -> int:
        """Return the number of free host blocks for swapped requests."""

    def num_held_blocks(self, request_id: str) -> int:
        """Return the number of device blocks that the request holds, shared ones included."""

    def num_held_host_blocks(self, request_id: str) -> int:
        """Return the number of blocks that the request holds in host memory."""

    def ledger(self) -> BlockLedger:
        """Return a new ledger for one plan."""


class BlockLedger(Protocol):
    """The effect of one plan on the free blocks, exact also where requests share blocks.

    `KVView.num_held_blocks` counts a shared block once for each request that holds it, so sums of
    it are too high with a prefix cache.
    """

    def num_ready_blocks(self, request_id: str) -> int:
        """Return the blocks of its computed tokens that need not be taken from the free ones.

        For a running request these are all that it holds.  For any other request these are its
        cached blocks that another request holds: a cached block without a holder counts as free.
        """

    def num_spared_blocks(self, request_id: str, num_tokens: int) -> int:
        """Return how many blocks fewer a waiting request takes than one for each `block_size`.

        That is until `num_tokens` are computed: where layers have a sliding window, the request
        gives back first blocks before it takes the last ones.
        """

    def num_blocks_to_load(self, request_id: str) -> int:
        """Return the blocks that are copied from the host when this waiting request starts.

        They are among the blocks that it takes from the free ones.
        """

    def find(self, request_id: str, planned: Mapping[str, int], num_lent: int = 0) -> int | None:
        """Return the tokens of a waiting request that will be cached when its turn comes.

        `planned` has the tokens by request of the plan so far, in its order; from call to call it
        only grows.  Before them `num_lent` blocks go to decodes that are served beside the plan.
        Return None if the answer is the request's `num_computed_tokens`, whatever is planned.
        """

    def start(self, request_id: str) -> None:
        """Note that a waiting or swapped request starts and holds what was found of it."""

    def leave(self, request_id: str) -> int:
        """Note that a running request gives up its blocks; return how many of them become free."""
