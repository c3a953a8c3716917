"""Lines: the parts of cached prefixes that were used by the same requests, as a tree."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from slosched.kv.prefix.keys import Key

_MOST_EMPTY = 4096
"""Lines without a cached block that are remembered, so that a return to them is noticed."""


@dataclass(slots=True, eq=False)
class Line:
    """A piece of a prefix: the blocks of places `start` to `stop`, and the history of its uses.

    A session that goes on makes its line longer.  Where two prompts part, the line is split: what
    they have in common is a line of its own, which the others follow.
    """

    parent: Line | None
    keys: Sequence[Key]
    """Keys from the first place of the prompt on; empty once no block of the line is cached."""
    start: int
    stop: int
    first_key: Key
    last_key: Key
    """The key of the block before `stop`."""
    cached_to: int
    """The blocks from `start` up to here are cached, so far as requests that have left know."""
    num_children: int = 0
    num_cached_children: int = 0
    """Lines that follow this one and have a cached block, so that this one cannot be evicted."""
    users: dict[str, int] = field(default_factory=dict)
    """Requests that have arrived with this prefix and have not ended: they need it, or will.  With
    each comes its number among all arrivals."""
    left_s: float = 0.0
    """Time at which it last lost its last user, in seconds."""
    left_number: int = 0
    """Number of the last release of its blocks, among all releases."""
    num_gaps: int = 0
    """Times that it was used again after it had no user."""
    log_gap_sum: float = 0.0
    """Sum of the natural logarithms of the times in between, in seconds."""
    returns_s: list[float] = field(default_factory=list)
    """Heap of the times at which it will be used again, for an order that knows the future."""
    rank_number: int = 0
    """Number of its rank that counts; older ones are void."""

    @property
    def is_cached(self) -> bool:
        """Tell whether any of its blocks is cached."""
        return self.cached_to > self.start


class Lines:
    """All lines, found by the keys of a prompt.  A walk takes O(lines on the way * log(blocks))."""

    def __init__(self) -> None:
        self._by_first_key: dict[Key, Line] = {}
        self._empty: OrderedDict[Line, None] = OrderedDict()
        """Lines without cached blocks that no line follows, the first one to be forgotten first."""
        self.freed: list[Line] = []
        """Lines that nothing cached follows since a short while; whoever takes them empties it."""

    def path(self, keys: Sequence[Key], num: int) -> list[Line]:
        """Return the lines of the first `num` keys; split one that goes another way or further."""
        found: list[Line] = []
        place = 0
        while place < num:
            line = self._by_first_key.get(keys[place])
            if line is None:
                break
            stop = min(line.stop, num)
            if stop < line.stop or keys[stop - 1] != line.last_key:
                if not line.keys:
                    self._forget(line)
                    break
                line = self._split(line, _first_difference(line.keys, keys, place, stop))
            if found and line.parent is not found[-1]:
                self._adopt(found[-1], line)
            found.append(line)
            place = line.stop
        return found

    def extended(self, keys: Sequence[Key], num: int, user: str) -> list[Line]:
        """Return the lines of the first `num` keys, all of which are cached, new ones included.

        They are those of the request `user`.  A line that another one uses, too, is not made
        longer, as that one may go another way.
        """
        path = self.path(keys, num)
        known = path[-1].stop if path else 0
        if known < num:
            if path and not path[-1].num_children and path[-1].users.keys() <= {user}:
                line = path[-1]
                line.stop, line.last_key = num, keys[num - 1]
            else:
                line = self._add(path[-1] if path else None, keys, known, num)
                path.append(line)
        for line in path:
            line.keys = keys
            self._set_cached(line, line.stop)
        return path

    def shorten(self, line: Line, cached_to: int) -> None:
        """Note that a line's blocks from `cached_to` on are gone."""
        parent = line.parent
        self._set_cached(line, cached_to)
        if parent is not None and not (line.is_cached or parent.num_cached_children):
            self.freed.append(parent)

    def all(self) -> list[Line]:
        """Return all lines, those without cached blocks included."""
        return list(self._by_first_key.values())

    def _set_cached(self, line: Line, cached_to: int) -> None:
        was_cached, line.cached_to = line.is_cached, cached_to
        if line.is_cached is was_cached:
            return
        if line.parent is not None:
            line.parent.num_cached_children += 1 if line.is_cached else -1
        if line.is_cached:
            self._empty.pop(line, None)
            return
        line.keys = ()
        self._note_if_empty(line)
        while len(self._empty) > _MOST_EMPTY:
            self._forget(next(iter(self._empty)))

    def _add(self, parent: Line | None, keys: Sequence[Key], start: int, stop: int) -> Line:
        line = Line(parent, keys, start, stop, keys[start], keys[stop - 1], cached_to=start)
        self._by_first_key[keys[start]] = line
        if parent is not None:
            parent.num_children += 1
            self._empty.pop(parent, None)
        return line

    def _adopt(self, parent: Line, line: Line) -> None:
        """Let `line` follow `parent`, since the one that it followed was forgotten.

        A key tells all blocks before its own, so there is no other line that it could follow.  Its
        users may have ended unseen, since no path led here meanwhile.
        """
        line.parent = parent
        line.users.clear()
        parent.num_children += 1
        parent.num_cached_children += line.is_cached
        self._empty.pop(parent, None)

    def _split(self, line: Line, place: int) -> Line:
        """Let a new line have what `line` has before `place`, and return it."""
        keys = line.keys
        head = Line(
            line.parent,
            keys,
            line.start,
            place,
            line.first_key,
            keys[place - 1],
            cached_to=min(place, line.cached_to),
            num_children=1,
            users=dict(line.users),
            left_s=line.left_s,
            left_number=line.left_number,
            num_gaps=line.num_gaps,
            log_gap_sum=line.log_gap_sum,
            returns_s=list(line.returns_s),
        )
        self._by_first_key[head.first_key] = head
        line.parent, line.start, line.first_key = head, place, keys[place]
        self._by_first_key[line.first_key] = line
        if line.cached_to > place:
            head.num_cached_children = 1
        else:
            line.cached_to = place
            line.keys = ()
            self._note_if_empty(line)
            self.freed.append(head)
        return head

    def _forget(self, line: Line) -> None:
        """Forget a line without cached blocks; those that follow it may be found again."""
        self._empty.pop(line, None)
        if self._by_first_key.get(line.first_key) is not line:
            return
        del self._by_first_key[line.first_key]
        parent = line.parent
        if parent is not None:
            parent.num_children -= 1
            self._note_if_empty(parent)

    def _note_if_empty(self, line: Line) -> None:
        if not (line.num_children or line.is_cached):
            self._empty[line] = None


def _first_difference(one: Sequence[Key], other: Sequence[Key], start: int, stop: int) -> int:
    """Return the first place of `start` to `stop` where two prompts differ, or `stop`."""
    return start + bisect_left(range(start, stop), True, key=lambda at: one[at] != other[at])
