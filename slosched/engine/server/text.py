"""Token ids to text, piece by piece and only whole characters."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_OPEN = "\ufffd"
"""What decoders write for bytes that are no character yet.  If tokens of single bytes follow each
other (Llama 2, Mistral, Gemma), it stands for each of them, also for those of whole characters,
until the last character is whole."""
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
    that may still be incomplete, that end is held back, as far as the window goes.
    """

    def __init__(self, decode: Decode, prompt: Sequence[int] = ()) -> None:
        """Begin behind a prompt, whose own text is not returned."""
        self._decode = decode
        self._window = _end_of(prompt, decode)
        self._num_chars_out = len(decode(self._window))
        """The number of characters of the window's text that have been returned."""
        self._piece_start = 0
        """The index in the window where the latest complete piece of text begins."""
        self._next_start = len(self._window)
        """The index where the piece behind it begins."""

    def add(self, token_id: int) -> str:
        """Return the text that this token made certain; often one word, sometimes nothing."""
        self._window.append(token_id)
        text = self._decode(self._window)
        is_complete = not text.endswith(_OPEN) or len(self._window) > _MAX_WINDOW_TOKENS
        end = len(text) if is_complete else len(text.rstrip(_OPEN))
        piece = text[self._num_chars_out : end]
        self._num_chars_out = max(end, self._num_chars_out)
        if is_complete:
            if piece:
                self._piece_start, self._next_start = self._next_start, len(self._window)
            self._move_window()
        return piece

    def flush(self) -> str:
        """Return the text that was held back, once the request has ended."""
        return self._decode(self._window)[self._num_chars_out :]

    def _move_window(self) -> None:
        """Drop tokens before the latest piece, all of whose text has been returned.

        It stays, since a decoder may drop the space that begins its text.
        """
        start = self._piece_start
        if len(self._window) <= (_WINDOW_TOKENS if start else _MAX_WINDOW_TOKENS):
            return
        start = start or len(self._window) // 2
        self._window = self._window[start:]
        self._num_chars_out = len(self._decode(self._window))
        self._piece_start, self._next_start = 0, max(0, self._next_start - start)


def _end_of(prompt: Sequence[int], decode: Decode) -> list[int]:
    """Return the last tokens of a prompt, to be decoded with those behind them.

    Many decoders drop a space that begins their text.  Fewer are returned where the first of them
    would be a part of a character that makes the others unreadable, and none if the prompt ends
    within a character, which is a part of the prompt's text.
    """
    for num_tokens in range(min(_NUM_BEFORE, len(prompt)), 0, -1):
        end = list(prompt[-num_tokens:])
        if not decode(end).endswith(_OPEN):
            return end
    return []
