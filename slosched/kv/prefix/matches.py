"""The cached part of each waiting request, kept up to date as blocks come and go."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from itertools import repeat

from slosched.kv.prefix.keys import Key


@dataclass(slots=True, eq=False)
class Match:
    """A waiting request whose first `num_blocks` blocks are cached and whose next one is not."""

    request_id: str
    keys: Sequence[Key]
    """Keys of the request; there may be more than it could use."""
    most_blocks: int
    """Number of cached blocks that it could use at most."""
    group: Group | None = None

    @property
    def num_blocks(self) -> int:
        return 0 if self.group is None else self.group.num_blocks


Around = tuple[Key | None, Key | None]
"""The key of the last block that is matched, if any, and of the next one, if any."""


@dataclass(slots=True, eq=False)
class Group:
    """Requests whose matches end at the same place."""

    around: Around
    num_blocks: int
    keys: Sequence[Key]
    """Keys of one of the requests."""
    num_alike: int
    """Number of first keys that all requests have in common and can use; there may be more."""
    members: dict[str, Match] = field(default_factory=dict)

    def add(self, match: Match) -> None:
        most = min(match.most_blocks, self.num_alike)
        self.num_alike = _num_alike(self.keys, match.keys, most)
        self.members[match.request_id] = match
        match.group = self

    def is_for(self, match: Match) -> bool:
        """Tell whether `match` waits for the same next block as this group."""
        num = self.num_blocks
        return num < match.most_blocks and match.keys[num] == self.around[1]


class Matches:
    """The matches of all waiting requests.

    The index is closed under prefixes.  So a match changes only when its last block goes or the
    block after it comes.  Requests that have these two keys in common form a group, which is listed
    under both.  A change concerns only the groups under its key, and costs O(log) for each.  A
    group stays together until its prompts differ.
    """

    def __init__(self, index: Container[Key]) -> None:
        """Begin without requests; `index` has the keys of all cached blocks."""
        self._index = index
        self._matches: dict[str, Match] = {}
        self._groups: dict[Around, Group] = {}
        self._concerned: dict[Key, dict[Around, None]] = {}
        """Groups by each key whose coming or going changes their matches."""
        self._new: dict[str, Match] = {}
        self._woken: list[Group] = []

    def get(self, request_id: str) -> Match | None:
        return self._matches.get(request_id)

    def add(self, match: Match) -> None:
        """Add a request, which is matched at the next `refresh`."""
        self._matches[match.request_id] = self._new[match.request_id] = match

    def remove(self, request_id: str) -> None:
        match = self._matches.pop(request_id, None)
        if match is None or self._new.pop(request_id, None) is not None:
            return
        group = match.group
        assert group is not None, "only who is new has no group"
        del group.members[request_id]
        if not group.members and self._groups.get(group.around) is group:
            self._close(group.around)

    def changed(self, keys: Sequence[Key]) -> None:
        """Note that blocks of `keys` have come or gone."""
        concerned = self._concerned
        if not (concerned and keys):
            return
        for key in [key for key in keys if key in concerned]:
            self._woken += map(self._close, list(concerned.get(key, ())))

    def through(self, key: Key, place: int) -> list[str]:
        """Return the requests that have this key at `place` and match it.  O(groups)."""
        return [
            request_id
            for group in self._groups.values()
            if place < group.num_blocks and group.keys[place] == key
            for request_id in group.members
        ]

    def refresh(self) -> list[tuple[str, int]]:
        """Match the requests again that a change concerns; return them with their cached blocks."""
        refreshed: list[tuple[str, int]] = []
        to_place: list[Match] = []
        for group in self._woken:
            num = self._num_cached(group.keys, group.num_alike)
            if num < group.num_alike:
                refreshed += zip(group.members, repeat(num), strict=False)
                self._move(group, num)
            else:
                to_place += group.members.values()
        to_place += self._new.values()
        self._woken.clear()
        self._new.clear()
        place: Group | None = None
        for match in to_place:
            if place is None or not place.is_for(match):
                place = self._place_of(match)
            place.add(match)
            refreshed.append((match.request_id, place.num_blocks))
        return refreshed

    def _num_cached(self, keys: Sequence[Key], most: int) -> int:
        """Return how many of the first `most` keys are cached."""
        index = self._index
        return bisect_left(keys, True, hi=most, key=lambda key: key not in index)

    def _move(self, group: Group, num: int) -> None:
        """Let the matches of `group` end at `num` blocks, joining a group that already does."""
        group.num_blocks, group.around = num, _around(group.keys, num, group.num_alike)
        there = self._groups.get(group.around)
        if there is not None:
            for match in group.members.values():
                there.add(match)
        elif group.members:
            self._open(group)

    def _place_of(self, match: Match) -> Group:
        """Return the group where `match` ends, which may be new."""
        keys, most = match.keys, match.most_blocks
        num = self._num_cached(keys, most)
        around = _around(keys, num, most)
        return self._groups.get(around) or self._open(Group(around, num, keys, most))

    def _open(self, group: Group) -> Group:
        for key in group.around:
            if key is not None:
                self._concerned.setdefault(key, {})[group.around] = None
        self._groups[group.around] = group
        return group

    def _close(self, around: Around) -> Group:
        for key in around:
            if key is not None:
                concerned = self._concerned[key]
                del concerned[around]
                if not concerned:
                    del self._concerned[key]
        return self._groups.pop(around)


def _around(keys: Sequence[Key], num: int, most: int) -> Around:
    """Return the keys around the end of a match of `num` blocks, of at most `most`."""
    return keys[num - 1] if num else None, keys[num] if num < most else None


def _num_alike(one: Sequence[Key], other: Sequence[Key], most: int) -> int:
    """Return how many of the first `most` keys are the same."""
    if not most or one[most - 1] == other[most - 1]:
        return most
    return bisect_left(range(most), True, key=lambda place: one[place] != other[place])
