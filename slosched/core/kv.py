"""The KV cache as a policy sees it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class KVView(Protocol):
    """The KV cache as a policy sees it: counts, no tensors and no way to change them."""

    @property
    def block_size(self) -> int:
        """Tokens in one KV block."""

    @property
    def num_blocks(self) -> int: ...
    @property
    def num_free_blocks(self) -> int: ...
    @property
    def num_free_host_blocks(self) -> int: ...

    def num_held_blocks(self, request_id: str) -> int:
        """Blocks that the request holds on the device."""

    def num_held_host_blocks(self, request_id: str) -> int:
        """Blocks that the request holds in host memory."""

    def ledger(self) -> BlockLedger:
        """For one plan, before anything of it is entered."""


class BlockLedger(Protocol):
    """What a plan does to the free blocks; requests may share theirs (prefix cache).

    `num_held_blocks` of a request counts the blocks that others hold, too.  Here it is exact,
    whatever order the plan is made in.
    """

    def num_ready_blocks(self, request_id: str) -> int:
        """Blocks of its computed tokens that need not be taken from the free ones.

        Of a running request all; of any other those, of what is cached, that somebody holds.
        """

    def num_blocks_to_load(self, request_id: str) -> int:
        """Blocks that are copied from the host when this waiting request starts.

        They are counted among those that it takes from the free ones.
        """

    def find(self, request_id: str, planned: Mapping[str, int], num_lent: int = 0) -> int | None:
        """Tokens of a waiting request that will be cached when it starts after those `planned`.

        `planned` are the tokens by request of the plan so far, in its order, and only ever grow;
        before them `num_lent` blocks go to decodes beside the plan.  None if it is what the
        request says, whatever is planned.
        """

    def start(self, request_id: str) -> None:
        """A waiting or swapped request holds what is cached of it, or was found last."""

    def leave(self, request_id: str) -> int:
        """A running request gives up its blocks; how many of them become free."""
