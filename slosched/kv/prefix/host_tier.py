"""The prefix cache's second tier: what the device evicts stays in host memory for a while.

A request that matches a block here takes a device block for it, into which it is copied back, and
shares that one from the end of the step on.  Until then the block here is pinned.

Blocks that are neither pinned nor on the device are dropped first, in the order in which they left
the device.  That is the least recently used first, and the tail of a prefix before its head,
because the device evicts a block only after all that follow it.  So both tiers together are closed
under prefixes, as the index of the device is: of a request's keys, a first part is on the device
and a next part only here.

Source: HiRadixCache of SGLang 0.5.5 (`--enable-hierarchical-cache`), whose copy of a block also
stays when the block is on the device again.  SGLang loads nothing of less than 10 tokens and copies
a layer while others are computed.  When the host is full it drops whole nodes of the tree, those
that were looked at longest ago, until it has the tokens that it needs.  Here only as many blocks
are dropped as are needed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Container, Sequence
from dataclasses import dataclass
from enum import StrEnum

from slosched.kv.pool import BlockPool
from slosched.kv.prefix.keys import Key
from slosched.kv.prefix.radix_index import RadixIndex


class HostWrites(StrEnum):
    """The moment at which a block of the prefix cache is copied to the host."""

    BACK = "write_back"
    THROUGH = "write_through"


@dataclass(frozen=True, slots=True)
class PrefixHost:
    """The host memory of the prefix cache, which is not that for preemption by swap."""

    num_blocks: int = 0
    writes: HostWrites = HostWrites.BACK
    """The time when a block is copied here: when the device evicts it, or as soon as it is full.
    The second copies every block once, so that none has to be copied when room is needed.  It needs
    more blocks here than on the device."""

    def __post_init__(self) -> None:
        if self.num_blocks < 0:
            raise ValueError(f"the prefix cache cannot have {self.num_blocks} blocks on the host")


NO_PREFIX_HOST = PrefixHost()


class NoHostTier:
    """The second tier of a prefix cache that keeps nothing in host memory."""

    @property
    def pinning(self) -> Sequence[str]:
        """Return the requests that are about to copy from here."""
        return ()

    def anywhere(self, device: Container[Key]) -> Container[Key]:
        """Return the keys that are cached on the device, which has `device`, or here."""
        return device

    def num_on_device(self, keys: Sequence[Key], num: int) -> int:  # noqa: ARG002
        """Return how many of the first `num` blocks, all cached, need no copy from here."""
        return num

    def pin(self, request_id: str, keys: Sequence[Key]) -> list[int]:  # noqa: ARG002
        """Keep the blocks of `keys` for a request that is about to copy them, and return them."""
        return []

    def unpin(self, request_id: str) -> None:
        """Note that the request has its copies or needs them no longer."""

    def take_over(self, evicted: Sequence[tuple[Key, int]]) -> list[Key]:
        """Note what the device evicts and return the keys that are now cached nowhere.

        Each comes after those that follow it.  The device blocks keep their content until the next
        step has begun with its copies.
        """
        return [key for key, _ in evicted]

    def arrived(
        self,
        keys: Sequence[Key],  # noqa: ARG002
        start: int,  # noqa: ARG002
        blocks: Sequence[int],  # noqa: ARG002
    ) -> Sequence[Key]:
        """Note that `keys` from `start` on are new on the device, in `blocks`.

        Return the keys that are now cached nowhere.
        """
        return ()

    def take_writes(self) -> list[tuple[int, int]]:
        """Return (device block, host block) pairs that the next step must copy before all else."""
        return []

    def clear(self) -> list[Key]:
        """Forget everything, as it can no longer be trusted; return the keys cached nowhere now.

        No request may have pinned any of it.
        """
        return []

    def is_sound(self) -> bool:
        """Tell whether every block is accounted for.  O(blocks)."""
        return True


class HostTier(NoHostTier):
    """The content of host blocks, the requests that are about to read it, and pending copies.

    Invariant: free + idle + pinned + blocks that are also on the device = all blocks.
    """

    def __init__(self, config: PrefixHost, device: Container[Key]) -> None:
        """Begin with an empty tier; `device` has the keys of the first tier."""
        self._writes_through = config.writes is HostWrites.THROUGH
        self._device = device
        self._pool = BlockPool(config.num_blocks)
        self._block: dict[Key, int] = {}
        self._idle: OrderedDict[Key, None] = OrderedDict()
        """Keys that are neither pinned nor on the device; the next one to go stands first."""
        self._num_pins: Counter[Key] = Counter()
        self._pinned: dict[str, Sequence[Key]] = {}
        self._to_write: dict[int, int] = {}
        """Device blocks that the next step copies, by host block."""
        self._node_ends: set[Key] = set()
        """Keys here at which nodes of the device's radix tree have ended."""
        if isinstance(device, RadixIndex):
            device.node_ends = self._node_ends

    def __contains__(self, key: Key) -> bool:
        return key in self._block

    def anywhere(self, device: Container[Key]) -> Container[Key]:
        return _BothTiers(device, self)

    def num_on_device(self, keys: Sequence[Key], num: int) -> int:
        device = self._device
        return bisect_left(keys, True, hi=num, key=lambda key: key not in device)

    def pin(self, request_id: str, keys: Sequence[Key]) -> list[int]:
        self._pinned[request_id] = keys
        self._num_pins.update(keys)
        self._node_ends.update(keys[-1:])
        for key in keys:
            self._idle.pop(key, None)
        return [self._block[key] for key in keys]

    def unpin(self, request_id: str) -> None:
        for key in reversed(self._pinned.pop(request_id, ())):
            self._num_pins[key] -= 1
            if not self._num_pins[key]:
                del self._num_pins[key]
                if key not in self._device:
                    self._idle[key] = None

    @property
    def pinning(self) -> Sequence[str]:
        return list(self._pinned)

    def take_over(self, evicted: Sequence[tuple[Key, int]]) -> list[Key]:
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

    def arrived(self, keys: Sequence[Key], start: int, blocks: Sequence[int]) -> Sequence[Key]:
        """Write through, if that is chosen, a block only if those before it are here."""
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
        writes = [(device, host) for host, device in self._to_write.items()]
        self._to_write.clear()
        return writes

    def clear(self) -> list[Key]:
        assert not self._pinned, "a request still counts on what is on the host"
        lost = list(self._idle)
        self._pool.give_back(self._block.values())
        self._block.clear()
        self._idle.clear()
        self._to_write.clear()
        self._node_ends.clear()
        return lost

    def is_sound(self) -> bool:
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
        """Copy a device block here, and tell whether there was a free or an idle block for it.

        Add the key that had the idle block to `lost`.
        """
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


@dataclass(frozen=True, slots=True)
class _BothTiers:
    """The keys that are cached on the device or on the host."""

    device: Container[Key]
    host: Container[Key]

    def __contains__(self, key: object) -> bool:
        return key in self.device or key in self.host
