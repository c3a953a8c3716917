"""Attention kernels that work on decodes alone or on chunks alone."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

from slosched.core import BatchShape
from slosched.perfmodel.attention.smooth import ROOFLINE_POWER, smooth_max, smooth_max_of_two
from slosched.perfmodel.columns import Array, Columns
from slosched.perfmodel.solve import Parameter


@dataclass(frozen=True)
class DecodeAttention:
    """The kernel of decodes: a launch, a part for each decode, and one pass over their KV cache.

    The pass takes at least as long as the longest context does on the processors it is split over.
    """

    launch_s: float
    per_request_s: float
    per_context_token_s: float
    per_longest_context_token_s: float

    def seconds(self, shape: BatchShape) -> float:
        return (
            self.launch_s
            + self.per_request_s * shape.num_decodes
            + smooth_max_of_two(
                self.per_context_token_s * shape.decode_context_tokens,
                self.per_longest_context_token_s * shape.max_decode_context_tokens,
            )
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

        The rest is as in `FittedModel.decode_ends`.  A simulation asks for hundreds of thousands of
        such steps a second, so `smooth_max_of_two` is inlined and sums are kept as floats, which
        hold these integers exactly.
        """
        num_decodes = float(shape.num_decodes)
        fixed_s = self.launch_s + self.per_request_s * shape.num_decodes
        token_s, longest_token_s = self.per_context_token_s, self.per_longest_context_token_s
        tokens = shape.decode_context_tokens + 0.0
        longest = shape.max_decode_context_tokens + 0.0
        end_s, ends_s = start_s, []
        for _ in range(most):
            a, b = token_s * tokens, longest_token_s * longest
            if a < b:
                a, b = b, a
            if b > 0:
                ratio = b / a
                ratio *= ratio
                a *= sqrt(sqrt(1 + ratio * ratio))
            end_s += (other_s + (fixed_s + a)) * factor
            ends_s.append(end_s)
            if end_s >= until_s:
                break
            tokens += num_decodes
            longest += 1.0
        return ends_s

    def column_seconds(self, c: Columns) -> Array:
        read_s = smooth_max(
            self.per_context_token_s * c.decode_context_tokens,
            self.per_longest_context_token_s * c.max_decode_context_tokens,
            ROOFLINE_POWER,
        )
        return self.launch_s + self.per_request_s * c.num_decodes + read_s


DECODE_PARAMETERS = (
    Parameter("launch_s", 3e-4, 1e-7, 1e-1),
    Parameter("per_request_s", 3e-6, 1e-9, 1e-2),
    Parameter("per_context_token_s", 1e-7, 1e-11, 1e-4),
    Parameter("per_longest_context_token_s", 1e-8, 1e-12, 1e-4),
)


@dataclass(frozen=True)
class PrefillAttention:
    """The kernel of chunks: a part for each chunk, query, key and (query, key) pair."""

    per_chunk_s: float
    per_token_s: float
    """Time per query token, in addition to what the step's other layers take for a token."""
    per_pair_s: float
    """Time for each (query, key) pair."""
    per_key_s: float
    """Time for each token of the chunks' contexts."""

    def seconds(self, shape: BatchShape) -> float:
        return (
            self.per_chunk_s * shape.num_prefills
            + self.per_token_s * shape.num_prefill_tokens
            + self.per_pair_s * shape.prefill_attention_tokens
            + self.per_key_s * shape.prefill_context_tokens
        )

    def column_seconds(self, c: Columns) -> Array:
        return (
            self.per_chunk_s * c.num_prefills
            + self.per_token_s * c.num_prefill_tokens
            + self.per_pair_s * c.prefill_attention_tokens
            + self.per_key_s * c.prefill_context_tokens
        )


PREFILL_PARAMETERS = (
    Parameter("per_chunk_s", 3e-4, 1e-8, 1e-1),
    Parameter("per_token_s", 1e-6, 1e-10, 1e-2),
    Parameter("per_pair_s", 3e-9, 1e-13, 1e-5),
    Parameter("per_key_s", 3e-8, 1e-12, 1e-4),
)
