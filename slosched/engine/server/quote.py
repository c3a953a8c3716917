"""The question and the answer of GET /v1/quote."""

from __future__ import annotations

from collections.abc import Mapping

from slosched.engine.server.errors import ApiError

_FIELD = "prompt_tokens"


def parse_prompt_tokens(query: Mapping[str, str], max_model_len: int) -> int:
    """Return the prompt length of a query; raise ApiError (400) if it is none or too long."""
    text = query.get(_FIELD)
    if text is None:
        raise ApiError(
            400,
            f"say how long the prompt is: /v1/quote?{_FIELD}=512 (/tokenize counts)",
            param=_FIELD,
        )
    most = max_model_len - 1
    if not (text.isascii() and text.isdecimal() and 1 <= int(text[:20]) <= most):
        raise ApiError(
            400, f"{_FIELD} must be an integer from 1 to {most}, not {text!r:.100}", param=_FIELD
        )
    return int(text)


def milliseconds_by_quantile(seconds: Mapping[float, float]) -> dict[str, float]:
    """Return times by the names of their quantiles: p50, p90 and so on."""
    return {f"p{100 * level:.0f}": 1000 * value for level, value in seconds.items()}
