"""How much of each waiting request is cached, kept true as blocks come and go."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass

from slosched.kv.keys import BlockKeys, Key


@dataclass(slots=True, eq=False)
class Match:
    """The first `num_blocks` blocks of a waiting request are cached, the next one is not."""

    request_id: str
    keys: BlockKeys
    most_blocks: int
    """That it could use."""
    num_blocks: int = 0


Around = tuple[Key, ...]
"""The key of the last block that is matched, if any, and of the next one, if any."""


class Matches:
    """Only those are looked at whose match may have changed: O(1) for an event, O(log) for each.

    The index is closed under prefixes.  So a match grows only by the block after its last one, and
    shrinks only by the last one: whoever waits is listed under these two keys, together with all
    who have the same two.
    """

    def __init__(self, index: Container[Key]) -> None:
        """`index` are the keys of what is cached."""
        self._index = index
        self._matches: dict[str, Match] = {}
        self._places: dict[Around, dict[str, Match]] = {}
        self._concerned: dict[Key, dict[Around, None]] = {}
        """By the keys whose coming or going changes their match."""
        self._woken: dict[str, Match] = {}

    def get(self, request_id: str) -> Match | None:
        return self._matches.get(request_id)

    def add(self, match: Match) -> None:
        """It is matched at the next `refresh`."""
        self._matches[match.request_id] = self._woken[match.request_id] = match

    def remove(self, request_id: str) -> None:
        match = self._matches.pop(request_id, None)
        if match is not None and self._woken.pop(request_id, None) is None:
            around = _around(match, match.num_blocks)
            del self._places[around][request_id]
            if not self._places[around]:
                self._close(around)

    def changed(self, keys: Sequence[Key]) -> None:
        """Blocks of these keys have come or gone."""
        concerned = self._concerned
        if not concerned:
            return
        for key in [key for key in keys if key in concerned]:
            for around in list(concerned.get(key, ())):
                self._woken.update(self._close(around))

    def refresh(self) -> list[Match]:
        """Match again whom a change concerns; those that were."""
        woken, self._woken = list(self._woken.values()), {}
        guess, after, place = 0, None, dict[str, Match]()
        for match in woken:
            known = match.keys.known
            # Many wait for the same, which the next key tells: then it is where the last one is.
            if guess >= match.most_blocks or guess >= len(known) or known[guess] != after:
                guess = self._found(match, guess)
                around = _around(match, guess)
                after = around[-1] if guess < match.most_blocks and around else None
                found = self._places.get(around)
                place = self._open(around) if found is None else found
            match.num_blocks = guess
            place[match.request_id] = match
        return woken

    def _open(self, around: Around) -> dict[str, Match]:
        for key in around:
            self._concerned.setdefault(key, {})[around] = None
        place = self._places[around] = {}
        return place

    def _close(self, around: Around) -> dict[str, Match]:
        for key in around:
            concerned = self._concerned[key]
            del concerned[around]
            if not concerned:
                del self._concerned[key]
        return self._places.pop(around)

    def _found(self, match: Match, guess: int) -> int:
        """How many blocks are cached; `guess` is what was found for the one before it.

        Keys are found only as far as the search goes, in growing strides: a long prompt that
        matches nothing costs one key.
        """
        index, low, most = self._index, match.num_blocks, match.most_blocks
        keys = match.keys.first(low)
        if low and keys[low - 1] not in index:
            return _boundary(index, keys, 0, low - 1)
        stride = 1
        while low < most:
            high = min(low + stride, most)
            keys = match.keys.first(high)
            high = min(high, len(keys))
            if low >= high or keys[high - 1] not in index:
                return _boundary(index, keys, low, high - 1)
            stride = guess - high if guess > high and stride == 1 else 2 * stride
            low = high
        return low


def _around(match: Match, num: int) -> Around:
    """If `num` blocks are matched."""
    stop = min(num + 1, match.most_blocks)
    return tuple(match.keys.first(stop)[num - 1 if num else 0 : stop])


def _boundary(index: Container[Key], keys: Sequence[Key], low: int, high: int) -> int:
    """The largest n in [low, high] whose first n keys are cached; those up to `low` are."""
    while low < high:
        middle = (low + high + 1) // 2
        if keys[middle - 1] in index:
            low = middle
        else:
            high = middle - 1
    return low
