"""The work of prefills: their time alone on the device, and in steps that they share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from slosched.core import LatencyModel, Request

_FULL_TOKENS = 512
"""Tokens of prompts with which a step is full: the first token costs much, and others share it."""


class Work(NamedTuple):
    """Prefills, in seconds."""

    alone_s: float
    """Their time if each is alone on the device."""
    shared_s: float
    """Their time in full steps, which they share."""


NO_WORK = Work(0.0, 0.0)


def work_of(num_tokens: int, num_prior_tokens: int, model: LatencyModel) -> Work:
    """Return the work of so many tokens of a prompt, of which others are computed already.

    A short prompt alone takes most of its time for what a step costs anyway.  Of many that wait, a
    step computes several, so that it costs that once.
    """
    if num_tokens <= 0:
        return NO_WORK
    alone_s = model.predict_prefill(num_tokens, num_prior_tokens)
    if num_tokens >= _FULL_TOKENS:
        return Work(alone_s, alone_s)
    full_s = model.predict_prefill(_FULL_TOKENS, num_prior_tokens)
    return Work(alone_s, min(alone_s, full_s * num_tokens / _FULL_TOKENS))


def prompt_work(request: Request, model: LatencyModel) -> Work:
    """Return the work of the rest of a request's prefill."""
    return work_of(request.num_uncomputed_tokens, request.num_computed_tokens, model)


def sum_of(works: Sequence[Work]) -> Work:
    return Work(sum([work.alone_s for work in works]), sum([work.shared_s for work in works]))
