"""Text up to the first stop string, in time linear in the text: the automaton of Aho and Corasick.

Source: Aho and Corasick, "Efficient string matching", CACM 1975.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class _State:
    """A beginning of stop strings: the longest one with which the text so far ends."""

    __slots__ = ("after", "fallback", "length", "stop_length")

    def __init__(self, length: int) -> None:
        self.length = length
        self.after: dict[str, _State] = {}
        """The states that are one character longer."""
        self.fallback: _State | None = None
        """The longest other state with which this one ends; None at the root."""
        self.stop_length = 0
        """The length of the longest stop string with which this one ends; 0 if there is none."""

    def next(self, character: str) -> _State:
        """Return the state after one more character.  O(1) amortized over a text."""
        state: _State | None = self
        while state is not None:
            if (after := state.after.get(character)) is not None:
                return after
            root, state = state, state.fallback
        return root


class StopStrings:
    """Passes text on up to the first stop string; holds back what may be the start of one.

    The stop string that is complete first counts, and of several the longest one.
    """

    def __init__(self, stops: Sequence[str], *, is_shown: bool = False) -> None:
        """`is_shown` tells whether the stop string itself is a part of the text."""
        self._is_shown = is_shown
        self._root = self._state = _automaton(stops)
        self._held = ""
        self.found = False

    def push(self, text: str) -> str:
        """Return the text that may be shown now; set `found` if it ends at a stop string."""
        state, num_held = self._state, len(self._held)
        if state is self._root and not state.after:
            return text
        shown, self._held = self._held + text, ""
        for end, character in enumerate(text, num_held + 1):
            state = state.next(character)
            if state.stop_length:
                self.found = True
                return shown[: end if self._is_shown else end - state.stop_length]
        self._state = state
        start = len(shown) - state.length
        self._held = shown[start:]
        return shown[:start]

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held


def _automaton(stops: Sequence[str]) -> _State:
    """Return the root of the automaton.  O(characters of all stop strings)."""
    root = _State(0)
    for stop in stops:
        state = root
        for character in stop:
            state = state.after.setdefault(character, _State(state.length + 1))
        state.stop_length = len(stop)
    queue = deque([root])
    while queue:
        state = queue.popleft()
        for character, after in state.after.items():
            fallback = state.fallback
            after.fallback = root if fallback is None else fallback.next(character)
            after.stop_length = after.stop_length or after.fallback.stop_length
            queue.append(after)
    return root
