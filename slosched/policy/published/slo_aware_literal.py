"""SLO-aware batching to the letter of its source."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from slosched.policy.slo_aware import EarlyReject, LateRule, SLOAware


@dataclass
class SLOAwareLiteral(SLOAware):
    """`slo_aware` with nothing added to the published algorithm.

    The tightest slack of all requests is the time limit of the whole batch, also if that request
    is late already.  Early rejection is for one step, and every waiting prefill is tested.  There
    is no margin, and a chunk may have any size.

    One rule of `slo_aware` stays, because without it a late decode would stop all work for ever:
    if nothing fits, all decodes are served nevertheless, or else the most urgent prompt.

    Source: the blog post "vllm reading" (2025-04-01), whose code is not public.  It leaves open how
    many timeouts are too many (`cascade`) and whether a prompt that has begun may be rejected
    (`expire_begun`).  The other readings are those that `SLOAware` lists.
    """

    late: LateRule = LateRule.BIND
    early_reject: EarlyReject = EarlyReject.ROUND
    max_early_rejects: int = 1_000_000
    min_chunk_tokens: int = 1
    margin: float = 0.0
    makes_way: ClassVar[bool] = False
