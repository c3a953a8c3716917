"""Token ids to text, piece by piece and only whole characters."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_MAX_OPEN_BYTES = 3
"""The most bytes that an incomplete UTF-8 character has; some decoders write a U+FFFD for each."""
_WINDOW_TOKENS = 16
_MAX_WINDOW_TOKENS = 64
_NUM_BEFORE = 5
"""How many tokens of the prompt are decoded together with the first ones behind it."""

Decode = Callable[[Sequence[int]], str]


def text_behind(prompt: Sequence[int], token_ids: Sequence[int], decode: Decode) -> str:
    """Return the text of tokens that come behind a prompt."""
    before = _end_of(prompt, decode)
    return decode([*before, *token_ids])[len(decode(before)) :]


class Detokenizer:
    """Turns tokens into text as they come; the pieces join to the text of all tokens.

    A token's text depends on its neighbours (the bytes of a character, a leading space), so a
    window of the latest tokens is decoded again for each token.  If the text ends in a character
    that may still be incomplete, that end is held back.
    """

    def __init__(self, decode: Decode, prompt: Sequence[int] = ()) -> None:
        """Begin behind a prompt, whose own text is not returned."""
        self._decode = decode
        self._window = _end_of(prompt, decode)
        self._num_chars_out = len(decode(self._window))
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


def _end_of(prompt: Sequence[int], decode: Decode) -> list[int]:
    """Return the last tokens of a prompt, to be decoded with those behind them.

    Many decoders drop a space that begins their text.  None are returned if the prompt ends within
    a character, which is a part of the prompt's text.
    """
    end = list(prompt[-_NUM_BEFORE:])
    return [] if _num_open(decode(end)) else end


def _num_open(text: str) -> int:
    """Return the number of trailing characters of `text` that later bytes may still change."""
    tail = text[-_MAX_OPEN_BYTES:]
    return len(tail) - len(tail.rstrip("\ufffd"))
