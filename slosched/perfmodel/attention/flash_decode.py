"""FlashAttention-2's kernel of decodes: few decodes have their keys split, many have not."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

import numpy as np

from slosched.perfmodel.attention.single import DecodeAttention
from slosched.perfmodel.attention.smooth import ROOFLINE_POWER, smooth_max
from slosched.perfmodel.columns import Array, Columns
from slosched.perfmodel.solve import Parameter

_FULL_WAVES = 0.8
"""Share of two blocks for each processor from which on FlashAttention-2 splits no keys."""
_WALKED_PER_READ = 2.0
"""First value of the time per walked token, over the time per token that is read."""


@dataclass(frozen=True)
class FlashDecodeAttention(DecodeAttention):
    """The kernel of decodes, which splits keys over processors only while there are few decodes.

    From `first_whole` decodes on, one block of threads for each KV head walks the whole context of
    a request, and the launch lasts until the longest walk has ended.  The more decodes there are,
    the slower each block walks, since they share the memory's bandwidth: measured, the longest walk
    takes `per_walked_token_s` · longest context · √decodes.

    Source: FlashAttention-2, csrc/flash_attn/flash_api.cpp, `num_splits_heuristic`.  The form was
    found on LLMServingSim's measurements of unequal contexts (RTX 4090, RTX PRO 6000).
    """

    per_walked_token_s: float
    """Time for each token of the longest context and root of the number of decodes, on top of
    `per_longest_context_token_s`."""
    first_whole: float
    """Number of decodes from which on keys are not split."""

    def longest_token_s(self, num_decodes: int) -> float:
        if num_decodes < self.first_whole:
            return self.per_longest_context_token_s
        return self.per_longest_context_token_s + self.per_walked_token_s * sqrt(num_decodes)

    def column_seconds(self, c: Columns) -> Array:
        walked_s = self.per_walked_token_s * np.sqrt(c.num_decodes)
        is_whole = c.num_decodes >= self.first_whole
        longest_token_s = self.per_longest_context_token_s + np.where(is_whole, walked_s, 0.0)
        read_s = smooth_max(
            self.per_context_token_s * c.decode_context_tokens,
            longest_token_s * c.max_decode_context_tokens,
            ROOFLINE_POWER,
        )
        return np.asarray(self.launch_s + self.per_request_s * c.num_decodes + read_s)


def first_whole_decodes(num_sms: float, num_kv_heads: float) -> float:
    """Return the number of decodes from which on FlashAttention-2 splits no keys."""
    return _FULL_WAVES * 2 * num_sms / num_kv_heads


def walked_parameter(per_context_token_s: float) -> Parameter:
    """Return the parameter `per_walked_token_s`; equal contexts do not determine it."""
    start = _WALKED_PER_READ * per_context_token_s
    return Parameter("per_walked_token_s", start, start / 30, start * 30)
