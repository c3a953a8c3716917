"""The question for quotes over HTTP, which our server and vLLM with our scheduler answer."""

from __future__ import annotations

QUOTE_PATH = "/v1/quote"
PROMPT_FIELD = "prompt_tokens"
"""The field of the query with one or several lengths of prompts."""
_MOST_LENGTHS = 16
"""Prompt lengths that one question may name."""
_MOST_DIGITS = 20
"""Digits of a length, zeros at its begin included; Python refuses to read thousands of them."""


def asked_lengths(text: str | None, max_model_len: int) -> list[int]:
    """Return the prompt lengths of a query, several of them with commas between.

    `text` is the query's value of `PROMPT_FIELD`, None if it has none.  Raises ValueError if there
    is none, one is too long, or there are too many.
    """
    if text is None:
        raise ValueError(
            f"say how long the prompt is: {QUOTE_PATH}?{PROMPT_FIELD}=512 (/tokenize counts)"
        )
    lengths = text.split(",", _MOST_LENGTHS)
    if len(lengths) > _MOST_LENGTHS:
        raise ValueError(f"{PROMPT_FIELD} may name at most {_MOST_LENGTHS} lengths")
    return [_length(each, max_model_len - 1) for each in lengths]


def _length(text: str, most: int) -> int:
    is_number = text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS
    if not (is_number and 1 <= int(text) <= most):
        raise ValueError(f"{PROMPT_FIELD} must be an integer from 1 to {most}, not {text!r:.100}")
    return int(text)
