"""The prefix cache's second tier: what the device evicts stays in host memory for a while.

A request that matches it takes device blocks for it, into which it is copied back, and shares them
from the end of that step on.  Until then its blocks here are pinned.

What nobody pins and the device does not have goes first, in the order in which it left the device:
that is the least recently used, and of one prefix its tail first, because a device evicts a block
only after all that follow it.  So both tiers together are closed under prefixes, as the device's
index is: of a request's keys a first part is on the device, and a next part only here.

Source: HiRadixCache of SGLang 0.5.5 (`--enable-hierarchical-cache`), whose copy of a block also
stays when the block is on the device again.  It loads nothing of less than 10 tokens, copies a
layer while others are computed, and when the host is full drops whole nodes of the tree, by when
they were last looked at and as many tokens as it needs.  Here as few blocks go as will do.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Container, Sequence
from dataclasses import dataclass
from enum import StrEnum

from slosched.kv.pool import BlockPool
from slosched.kv.prefix.keys import Key
from slosched.kv.prefix.radix_index import RadixIndex


class HostWrites(StrEnum):
    """When a block of the prefix cache is copied to the host."""

    BACK = "write_back"
    THROUGH = "write_through"


@dataclass(frozen=True, slots=True)
class PrefixHost:
    """How much host memory the prefix cache has, beside that for preemption by swap."""

    num_blocks: int = 0
    writes: HostWrites = HostWrites.BACK
    """When the device evicts it, or as soon as it is full.  The second copies every block once, so
    that none has to be copied when room is needed; it wants more blocks here than on the device."""

    def __post_init__(self) -> None:
        if self.num_blocks < 0:
            raise ValueError(f"the prefix cache cannot have {self.num_blocks} blocks on the host")


NO_PREFIX_HOST = PrefixHost()


class HostTier:
    """Which host block holds which content, who is about to read it, and what has to be copied.

    Invariant: free + idle + pinned + those that the device has, too = all blocks.
    """

    def __init__(self, config: PrefixHost, device: Container[Key]) -> None:
        """`device` are the keys of the first tier."""
        self._writes_through = config.writes is HostWrites.THROUGH
        self._device = device
        self._pool = BlockPool(config.num_blocks)
        self._block: dict[Key, int] = {}
        self._idle: OrderedDict[Key, None] = OrderedDict()
        """Neither pinned nor on the device; the next one to go stands first."""
        self._num_pins: Counter[Key] = Counter()
        self._pinned: dict[str, Sequence[Key]] = {}
        self._to_write: dict[int, int] = {}
        """Device blocks that the next step copies, by the host block."""
        self._node_ends: set[Key] = set()
        """Of what is here, where nodes of the device's radix tree have ended."""
        if isinstance(device, RadixIndex):
            device.node_ends = self._node_ends

    def __contains__(self, key: Key) -> bool:
        return key in self._block

    def pin(self, request_id: str, keys: Sequence[Key]) -> list[int]:
        """The request is about to copy these to the device; which blocks they are in."""
        self._pinned[request_id] = keys
        self._num_pins.update(keys)
        self._node_ends.update(keys[-1:])
        for key in keys:
            self._idle.pop(key, None)
        return [self._block[key] for key in keys]

    def unpin(self, request_id: str) -> None:
        """The request has its copies, or needs them no longer."""
        for key in reversed(self._pinned.pop(request_id, ())):
            self._num_pins[key] -= 1
            if not self._num_pins[key]:
                del self._num_pins[key]
                if key not in self._device:
                    self._idle[key] = None

    @property
    def pinning(self) -> Sequence[str]:
        """Requests that are about to copy from here."""
        return list(self._pinned)

    def take_over(self, evicted: Sequence[tuple[Key, int]]) -> list[Key]:
        """The device forgets these, each after those that follow it; which keys are then nowhere.

        Its blocks keep their content until the next step has begun with its copies.
        """
        lost: list[Key] = []
        for key, device_block in evicted:
            if key not in self._block and (
                self._writes_through or not self._write(key, device_block, lost)
            ):
                lost.append(key)
            elif key not in self._num_pins:
                self._idle[key] = None
        self._node_ends.difference_update(lost)
        return lost

    def arrived(self, keys: Sequence[Key], start: int, blocks: Sequence[int]) -> list[Key]:
        """From `start` on a prefix is new on the device, in these blocks; what is nowhere now.

        Writing through, a block is only written if those before it are here.
        """
        lost: list[Key] = []
        for key in keys[start:]:
            self._idle.pop(key, None)
        if self._writes_through and (start == 0 or keys[start - 1] in self._block):
            for key, device_block in zip(keys[start:], blocks, strict=True):
                if key not in self._block and not self._write(key, device_block, lost):
                    break
        self._node_ends.difference_update(lost)
        return lost

    def take_writes(self) -> list[tuple[int, int]]:
        """(device block, host block) of what the next step has to copy before anything else."""
        writes = [(device, host) for host, device in self._to_write.items()]
        self._to_write.clear()
        return writes

    def clear(self) -> list[Key]:
        """Nothing here can be trusted any more, and nobody pins it; which keys are then nowhere."""
        assert not self._pinned, "a request still counts on what is on the host"
        lost = list(self._idle)
        self._pool.give_back(self._block.values())
        self._block.clear()
        self._idle.clear()
        self._to_write.clear()
        self._node_ends.clear()
        return lost

    def is_sound(self) -> bool:
        """Whether the invariant holds.  O(blocks)."""
        blocks, free, idle = self._block.values(), self._pool.free_blocks, self._idle.keys()
        pins = Counter(key for keys in self._pinned.values() for key in keys)
        return (
            len(free) == self._pool.num_free
            and len(free) + len(self._block) == self._pool.num_blocks
            and free.union(blocks) == frozenset(range(self._pool.num_blocks))
            and pins == self._num_pins
            and pins.keys() <= self._block.keys()
            and idle == {k for k in self._block if k not in pins and k not in self._device}
            and self._to_write.keys() <= set(blocks)
            and self._node_ends <= self._block.keys()
        )

    def _write(self, key: Key, device_block: int, lost: list[Key]) -> bool:
        """Keep it here, too, if there is a block that is free or may be."""
        if self._pool.num_free:
            [block] = self._pool.take(1)
        elif self._idle:
            oldest, _ = self._idle.popitem(last=False)
            block = self._block.pop(oldest)
            lost.append(oldest)
        else:
            return False
        self._block[key] = block
        self._to_write[block] = device_block
        return True
