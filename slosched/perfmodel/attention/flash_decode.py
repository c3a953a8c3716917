"""FlashAttention-2's kernel of decodes: few decodes have their keys split, many have not."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from slosched.core import BatchShape
from slosched.perfmodel.attention.single import DecodeAttention
from slosched.perfmodel.attention.smooth import ROOFLINE_POWER, smooth_max, smooth_max_of_two
from slosched.perfmodel.columns import Array, Columns
from slosched.perfmodel.solve import Parameter

_FULL_WAVES = 0.8
"""Share of two blocks for each processor from which on FlashAttention-2 splits no keys."""
_RAMP_PER_LAUNCH = 8.0
"""First value of the longest ramp, over the time of a launch."""
_L2_TOKENS = 280_000
"""First value of the context tokens whose keys and values of one KV head fill the L2 cache."""


@dataclass(frozen=True)
class FlashDecodeAttention(DecodeAttention):
    """The kernel of decodes, which splits keys over processors only while there are few decodes.

    From `first_whole` decodes on, one block of threads for each KV head walks the whole context of
    a request, and the launch lasts until the longest walk has ended.  When the other decodes are
    done, the longest walk has covered the mean context and a little more.  The rest of it has the
    memory for itself but cannot use its bandwidth: a token takes `alone_slowdown` times as long.

    A launch also takes a while until it reads at full speed, and again when its last blocks end:
    the ramp.  Measured, it grows with the decodes and with what is read up to `ramp_s`, and stays
    there.  What each decode takes besides is hidden while the cache is read, so that the longer of
    the two counts.

    Source: FlashAttention-2, csrc/flash_attn/flash_api.cpp, `num_splits_heuristic`.  The form was
    found on LLMServingSim's measurements of equal and unequal contexts (RTX 4090, RTX PRO 6000).
    """

    alone_slowdown: float
    """Times as long as a token takes in the end of the longest walk; at most half of `first_whole`,
    so that a longer context never makes the launch shorter."""
    walked_beside: float
    """What the longest walk covers beside the others, beyond the mean context: a share, up to 1, of
    all contexts over `first_whole`."""
    ramp_s: float
    """The ramp of many decodes of long contexts."""
    ramp_tokens: float
    """Context tokens at which half of the ramp is reached."""
    first_whole: float
    """Number of decodes from which on keys are not split, and at which half of the ramp is
    reached."""

    def seconds(self, shape: BatchShape) -> float:
        return self._seconds(
            shape.num_decodes, shape.decode_context_tokens, shape.max_decode_context_tokens
        )

    def successive_ends(
        self,
        shape: BatchShape,
        other_s: float,
        start_s: float,
        most: int,
        until_s: float,
        factor: float,
    ) -> list[float]:
        """Return when steps end that each take `factor * (other_s + seconds(shape))`.

        The rest is as in `FittedModel.decode_ends`.
        """
        num_decodes = shape.num_decodes
        tokens, longest = shape.decode_context_tokens, shape.max_decode_context_tokens
        end_s, ends_s = start_s, []
        for _ in range(most):
            end_s += (other_s + self._seconds(num_decodes, tokens, longest)) * factor
            ends_s.append(end_s)
            if end_s >= until_s:
                break
            tokens += num_decodes
            longest += 1
        return ends_s

    def _seconds(self, num_decodes: int, tokens: int, longest: int) -> float:
        """Return the seconds of so many decodes, from the sum and the longest of their contexts."""
        token_s, first_whole = self.per_context_token_s, self.first_whole
        read_s = smooth_max_of_two(token_s * tokens, self.per_longest_context_token_s * longest)
        if num_decodes >= first_whole:
            alone = longest - tokens * (1 / num_decodes + self.walked_beside / first_whole)
            read_s = max(read_s, token_s * (tokens + self.alone_slowdown * alone))
        full = (tokens + self.ramp_tokens) * (num_decodes + first_whole)
        read_s += self.ramp_s * tokens * num_decodes / full
        return self.launch_s + smooth_max_of_two(self.per_request_s * num_decodes, read_s)

    def column_seconds(self, c: Columns) -> Array:
        num_decodes, tokens = c.num_decodes, c.decode_context_tokens
        longest, token_s = c.max_decode_context_tokens, self.per_context_token_s
        read_s = smooth_max(
            token_s * tokens, self.per_longest_context_token_s * longest, ROOFLINE_POWER
        )
        mean_tokens = tokens / np.maximum(1, num_decodes)
        alone = longest - mean_tokens - tokens * self.walked_beside / self.first_whole
        whole_s = token_s * (tokens + self.alone_slowdown * alone)
        is_whole = num_decodes >= self.first_whole
        read_s = np.where(is_whole, np.maximum(read_s, whole_s), read_s)
        full = (tokens + self.ramp_tokens) * (num_decodes + self.first_whole)
        read_s += self.ramp_s * tokens * num_decodes / full
        overlapped_s = smooth_max(self.per_request_s * num_decodes, read_s, ROOFLINE_POWER)
        return np.asarray(self.launch_s + overlapped_s)


def first_whole_decodes(num_sms: float, num_kv_heads: float) -> float:
    """Return the number of decodes from which on FlashAttention-2 splits no keys."""
    return _FULL_WAVES * 2 * num_sms / num_kv_heads


def flash_parameters(
    launch_s: float, num_kv_heads: float, first_whole: float
) -> tuple[Parameter, ...]:
    """Return the parameters that only unequal contexts determine, and those of the ramp."""
    ramp_s = _RAMP_PER_LAUNCH * launch_s
    tokens = _L2_TOKENS / num_kv_heads
    return (
        Parameter("alone_slowdown", first_whole / 4, first_whole / 40, first_whole / 2),
        Parameter("walked_beside", 0.4, 0.04, 1.0),
        Parameter("ramp_s", ramp_s, ramp_s / 100, ramp_s * 100),
        Parameter("ramp_tokens", tokens, tokens / 10, tokens * 10),
    )
