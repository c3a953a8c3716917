"""Token ids to text, piece by piece: only whole characters, and nothing after a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_MAX_OPEN_BYTES = 3
"""The most bytes that an incomplete UTF-8 character has; some decoders write a U+FFFD for each."""
_WINDOW_TOKENS = 16
_MAX_WINDOW_TOKENS = 64


class Detokenizer:
    """Turns tokens into text as they come; the pieces join to the text of all tokens.

    A token's text depends on its neighbours (the bytes of a character, a leading space), so a
    window of the latest tokens is decoded again for each token.  If the text ends in a character
    that may still be incomplete, that end is held back.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._num_chars_out = 0
        """The number of characters of the window's text that have been returned."""
        self._piece_start = 0
        """The index in the window where the latest complete piece of text begins."""

    def add(self, token_id: int) -> str:
        """Return the text that this token made certain; often one word, sometimes nothing."""
        self._window.append(token_id)
        text = self._decode(self._window)
        end = len(text) - _num_open(text)
        piece = text[self._num_chars_out : end]
        self._num_chars_out = max(end, self._num_chars_out)
        if end == len(text):
            self._move_window(_WINDOW_TOKENS)
            self._piece_start = len(self._window)
        else:
            self._move_window(_MAX_WINDOW_TOKENS)
        return piece

    def flush(self) -> str:
        """Return the text that was held back, once the request has ended."""
        return self._decode(self._window)[self._num_chars_out :]

    def _move_window(self, max_tokens: int) -> None:
        """Drop old tokens from the window, at a boundary of complete characters if there is one."""
        if len(self._window) <= max_tokens:
            return
        start = self._piece_start or len(self._window) // 2
        text = self._decode(self._window)
        held = len(text) - self._num_chars_out
        self._window = self._window[start:]
        self._num_chars_out = len(self._decode(self._window)) - held
        self._piece_start = 0


def _num_open(text: str) -> int:
    """Return the number of trailing characters of `text` that later bytes may still change."""
    tail = text[-_MAX_OPEN_BYTES:]
    return len(tail) - len(tail.rstrip("\ufffd"))


class StopStrings:
    """Passes text on up to the first stop string; holds back what may be the start of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self.found = False

    def push(self, text: str) -> str:
        """Return the text that may be shown now; set `found` if it ends at a stop string."""
        text = self._held + text
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            # the stop string that is complete first, however the text was cut into pieces
            _, start = min(found)
            self.found, self._held = True, ""
            return text[:start]
        num_held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that is a proper beginning of `stop`."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
