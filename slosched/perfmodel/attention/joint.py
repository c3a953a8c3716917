"""Backends with one kernel for chunks and decodes: FlashAttention-2."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt
from typing import ClassVar

import numpy as np

from slosched.core import ATTENTION_TILE_TOKENS, BatchShape
from slosched.perfmodel.attention.single import DecodeAttention
from slosched.perfmodel.attention.smooth import TWO_THIRDS, smooth_max
from slosched.perfmodel.columns import Array, Columns
from slosched.perfmodel.solve import Parameter

_OVERLAP_POWER = 1.5
"""Power of the smooth maximum of the longest walk and all walks together.

It is low because the blocks that start last are seldom the longest ones. `one_plus_to_two_thirds`
is made for this power.
"""
_ROWS = ATTENTION_TILE_TOKENS


@dataclass(frozen=True)
class JointKernel:
    """FlashAttention-2 over chunks and decodes in one launch.

    One block of threads works on 64 query rows of one head and walks all their keys, one after the
    other: `tiles` blocks a head in total, `tile_tokens` keys walked.  A decode that shares the
    launch is a block of its own with a single useful row.  The launch takes

    - at least the longest walk (`per_walked_token_s` a key, which is more than the average block
      takes per key),
    - at least all walks spread over the processors (`per_tile_token_s`), once there are more
      blocks than processors,
    - about twice the longest walk that can occur in more blocks than there are processors: a
      second wave that is nearly empty takes as long as a full one (`wave_share` of it counts),
    - at least the time to read the KV cache from memory; when one head's share of the cache
      outgrows L2, each query head of a group reads it again, up to `group_size` times,

    and a little for every block of the grid, nearly all of which are empty for decodes.

    Sources: FlashAttention-2's varlen launch (csrc/flash_attn: query rows are packed by group and
    keys are split only if max_seqlen_q is 1) and the wave model of GPU scheduling.  The form and
    its constants were found on LLMServingSim's joint measurements (RTX 4090, RTX PRO 6000).
    """

    tiles_per_wave: float
    """Processors per query head: the number of blocks of each head that run at once."""
    group_size: float
    """Query heads that share a KV head."""
    launch_s: float
    per_tile_token_s: float
    per_walked_token_s: float
    per_grid_block_s: float
    per_streamed_token_s: float
    tile_overhead_tokens: float
    """Cost of starting and ending a block, expressed in keys walked."""
    saturation: float
    """Waves that run before blocks have to wait for each other."""
    wave_share: float
    """Share of the second wave that overlaps with nothing."""
    l2_tokens: float
    """Context tokens whose keys and values of one KV head fill the L2 cache."""
    reread_tiles: float
    """Blocks per head from which on the query heads of a group no longer share their reads."""

    def asked(self, decode_s: Callable[[BatchShape], float]) -> Callable[[BatchShape], float]:
        """Return a fast version of `column_seconds` for one shape.

        `decode_s` answers for shapes without a chunk. A scheduler calls the function many times in
        every decision, so constants are computed here once, calls are avoided, and constants are
        floats, as Python adds a float to a float faster than to an int.
        """
        overhead, launch_s = self.tile_overhead_tokens, self.launch_s
        walked_s, tile_token_s = self.per_walked_token_s, self.per_tile_token_s
        streamed_s, grid_block_s = self.per_streamed_token_s, self.per_grid_block_s
        wave_share, tiles_per_wave = self.wave_share, self.tiles_per_wave
        saturated_tiles = self.saturation * self.tiles_per_wave
        group_size, rereads_per_tile = self.group_size, self.group_size / self.reread_tiles
        second_wave_walk = self._second_wave_walk
        l2_per_token, rows_per_tile = 1 / self.l2_tokens, 1 / _ROWS
        (a, b), (c, d) = TWO_THIRDS

        def seconds(shape: BatchShape) -> float:
            num_decodes, num_prefills = shape.num_decodes, shape.num_prefills
            if not num_prefills:
                return decode_s(shape)
            prefill_tiles, decode_tokens = shape.num_prefill_tiles, shape.decode_context_tokens
            tiles = prefill_tiles + num_decodes + 0.0  # a float
            walked = shape.prefill_tile_tokens + decode_tokens + overhead * tiles
            longest = shape.max_context_tokens + overhead
            compute_s = walk_s = walked_s * longest
            if tiles > saturated_tiles:
                work_s = tile_token_s * walked * (1.0 - saturated_tiles / tiles)
                if work_s < walk_s:
                    ratio = work_s / walk_s
                else:
                    ratio, compute_s = walk_s / work_s, work_s
                ratio *= sqrt(ratio)
                # `one_plus_to_two_thirds` inlined, to save the call.
                compute_s *= (1.0 + ratio * (a + ratio * b)) / (1.0 + ratio * (c + ratio * d))
            # A second wave takes at most twice the longest walk.
            if tiles > tiles_per_wave and compute_s < 2.0 * walk_s:
                second_s = 2 * walked_s * second_wave_walk(shape, walked)
                if second_s > compute_s:
                    compute_s += wave_share * (second_s - compute_s)
            tokens = shape.prefill_context_tokens + decode_tokens
            stream_s = streamed_s * tokens
            rereads = rereads_per_tile * tiles
            if rereads > 1.0:
                if rereads > group_size:
                    rereads = group_size
                filled = tokens * l2_per_token
                filled *= filled
                filled *= filled
                stream_s *= 1.0 + (rereads - 1.0) * filled / (1.0 + filled)
            grid = (num_prefills + num_decodes) * (
                1.0 + rows_per_tile * sqrt(shape.squared_chunk_tokens)
            )
            overlapped_s = sqrt(compute_s * compute_s + stream_s * stream_s)
            return launch_s + grid_block_s * grid + overlapped_s

        return seconds

    def _second_wave_walk(self, shape: BatchShape, walked: float) -> float:
        """Return the longest walk, in keys, that more than one wave of blocks can have.

        At most min(tiles, walked / l) blocks of the chunks walk l keys or more, and the same holds
        for the decodes. The result is the l at which both counts together make one wave. It grows
        with every sum, so that no added request makes the launch shorter.
        """
        overhead, wave = self.tile_overhead_tokens, self.tiles_per_wave
        num_decodes, prefill_tiles = shape.num_decodes, shape.num_prefill_tiles
        decode_walked = shape.decode_context_tokens + overhead * num_decodes
        prefill_walked = walked - decode_walked
        walk = walked / wave
        if walk * prefill_tiles < prefill_walked:
            walk = decode_walked / (wave - prefill_tiles)
        elif walk * num_decodes < decode_walked:
            walk = prefill_walked / (wave - num_decodes)
        longest_decode = shape.max_decode_context_tokens + overhead if num_decodes else 0.0
        if walk > longest_decode:
            walk = longest_decode
            if prefill_tiles > wave and prefill_walked > walk * wave:
                walk = prefill_walked / wave
        return min(walk, shape.max_context_tokens + overhead)

    def column_seconds(self, c: Columns) -> Array:
        """Return the seconds of shapes that have a chunk; for others the result means nothing."""
        overhead = self.tile_overhead_tokens
        tiles = c.num_prefill_tiles + c.num_decodes
        prefill_walked = c.prefill_tile_tokens + overhead * c.num_prefill_tiles
        decode_walked = c.decode_context_tokens + overhead * c.num_decodes
        walked = prefill_walked + decode_walked
        longest = c.max_context_tokens + overhead
        waves = tiles / self.tiles_per_wave
        walk_s = self.per_walked_token_s * longest
        work_s = self.per_tile_token_s * walked * np.maximum(0, 1 - self.saturation / waves)
        compute_s = smooth_max(walk_s, work_s, _OVERLAP_POWER)
        second = self._second_wave_walks(c, prefill_walked, decode_walked, longest)
        second_s = np.where(waves > 1, 2 * self.per_walked_token_s * second, 0.0)
        compute_s += self.wave_share * np.maximum(0, second_s - compute_s)
        tokens = c.prefill_context_tokens + c.decode_context_tokens
        rereads = np.clip(self.group_size * tiles / self.reread_tiles, 1, self.group_size)
        spilt = (self.l2_tokens / tokens) ** 4
        stream_s = self.per_streamed_token_s * tokens * (1 + (rereads - 1) / (1 + spilt))
        grid = c.num_reqs * (1 + np.sqrt(c.squared_chunk_tokens) / _ROWS)
        return np.asarray(
            self.launch_s + self.per_grid_block_s * grid + np.hypot(compute_s, stream_s)
        )

    def _second_wave_walks(
        self, c: Columns, prefill_walked: Array, decode_walked: Array, longest: Array
    ) -> Array:
        """Compute `_second_wave_walk` for many shapes at once."""
        wave = self.tiles_per_wave
        walk = (prefill_walked + decode_walked) / wave
        with np.errstate(divide="ignore", invalid="ignore"):
            walk = np.where(
                walk * c.num_prefill_tiles < prefill_walked,
                decode_walked / (wave - c.num_prefill_tiles),
                np.where(
                    walk * c.num_decodes < decode_walked,
                    prefill_walked / (wave - c.num_decodes),
                    walk,
                ),
            )
        overhead = self.tile_overhead_tokens
        decodes = np.where(c.num_decodes > 0, c.max_decode_context_tokens + overhead, 0.0)
        chunks = np.where(c.num_prefill_tiles > wave, prefill_walked / wave, 0.0)
        beyond = np.maximum(decodes, chunks)
        return np.minimum(longest, np.where(walk > decodes, beyond, walk))


def joint_parameters(decode: DecodeAttention, tiles_per_wave: float) -> tuple[Parameter, ...]:
    """Return the parameters of a `JointKernel`, started from the same device's decode kernel.

    Both kernels read the same cache, so the time per token of the decodes sets the scale. The
    ratios are typical of FlashAttention-2 with heads of 128.
    """
    token_s = decode.per_context_token_s

    def around(name: str, start: float, factor: float, weight: float = 0.01) -> Parameter:
        return Parameter(name, start, start / factor, start * factor, weight)

    return (
        around("launch_s", 0.4 * decode.launch_s, 30),
        around("per_tile_token_s", 1.6 * token_s, 30),
        around("per_walked_token_s", 7 * token_s, 30),
        around("per_grid_block_s", 20 * token_s, 100),
        # Both kernels read the same bytes from the same memory, so this is held close to its
        # start: otherwise a fit on small caches could invent a cliff at large ones, or miss one.
        around("per_streamed_token_s", 0.75 * token_s, 1.2, 1.0),
        around("tile_overhead_tokens", 150, 8),
        around("saturation", 0.75, 3),
        Parameter("wave_share", 0.5, 0.05, 1, 0.1),
        around("l2_tokens", 280_000, 10, 0.1),
        around("reread_tiles", 17 * tiles_per_wave, 6, 0.1),
    )


@dataclass(frozen=True)
class JointAttention:
    """One kernel for chunks and decodes together; steps of decodes alone use another."""

    kind: ClassVar[str] = "joint"
    kernel: JointKernel
    decode: DecodeAttention

    def asked(self) -> Callable[[BatchShape], float]:
        return self.kernel.asked(self.decode.seconds)

    def column_seconds(self, c: Columns) -> Array:
        joint_s = self.kernel.column_seconds(c)
        return np.where(c.num_prefills > 0, joint_s, self.decode.column_seconds(c))
