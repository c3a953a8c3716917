"""Backends with one kernel for chunks and decodes: FlashAttention-2."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from slosched.core import BatchShape
from slosched.perfmodel.attention.single import DecodeAttention
from slosched.perfmodel.attention.smooth import smooth_max, smooth_max_of_two
from slosched.perfmodel.columns import Array, Columns
from slosched.perfmodel.solve import Parameter


@dataclass(frozen=True)
class JointKernel:
    """FlashAttention-2 over chunks and decodes in one launch.

    One block of threads works on 64 query rows of one head and walks all their keys, one after
    the other: `tiles` blocks a head in total, `tile_tokens` keys walked.  A decode that shares
    the launch is a block of its own with a single useful row.  The launch takes

    - at least the longest walk (`per_walked_token_s` a key, more than any average shows),
    - at least all walks spread over the processors (`per_tile_token_s`), once there are more
      blocks than processors, and whole waves of them if all walks are equally long,
    - at least the KV cache's way through memory; when one head's share of the cache outgrows L2,
      each query head of a group reads it anew, up to `group_size` times,

    and a little for every block of the grid, of which decodes leave nearly all empty.

    Sources: FlashAttention-2's varlen launch (csrc/flash_attn: query rows are packed by group and
    keys are split only if max_seqlen_q is 1), the wave model of GPU scheduling; the form and its
    constants were found on LLMServingSim's joint measurements (RTX 4090, RTX PRO 6000).
    """

    tiles_per_wave: float
    """Processors per query head: so many blocks of each head run at once."""
    group_size: float
    """Query heads that share a KV head."""
    launch_s: float
    per_tile_token_s: float
    per_walked_token_s: float
    per_grid_block_s: float
    per_streamed_token_s: float
    tile_overhead_tokens: float
    """What starting and ending a block costs, in keys walked."""
    saturation: float
    """Waves that run before blocks have to wait for each other."""
    overlap_power: float
    wave_power: float
    l2_tokens: float
    """Context tokens whose keys and values of one KV head fill L2."""
    reread_tiles: float
    """Blocks a head from which on a group's query heads no longer read together."""
    stream_power: float

    def seconds(self, shape: BatchShape) -> float:
        overhead = self.tile_overhead_tokens
        tiles = shape.num_prefill_tiles + shape.num_decodes
        walked = shape.prefill_tile_tokens + shape.decode_context_tokens + overhead * tiles
        longest = shape.max_context_tokens + overhead
        waves = tiles / self.tiles_per_wave
        walk_s = self.per_walked_token_s * longest
        compute_s = walk_s
        if waves > self.saturation:
            work_s = self.per_tile_token_s * walked * (1 - self.saturation / waves)
            compute_s = smooth_max_of_two(walk_s, work_s, self.overlap_power)
        evenness = walked / (tiles * longest)
        quantum_s = walk_s * math.ceil(evenness * waves - 1e-9)
        compute_s += (quantum_s - compute_s) * evenness ** (self.wave_power * (1 + waves))
        tokens = shape.prefill_context_tokens + shape.decode_context_tokens
        rereads = self.group_size * tiles / self.reread_tiles
        stream_s = self.per_streamed_token_s * tokens
        if rereads > 1:
            spilt = (self.l2_tokens / tokens) ** 4
            stream_s *= 1 + (min(rereads, self.group_size) - 1) / (1 + spilt)
        grid = (
            (shape.num_prefills + shape.num_decodes) * shape.num_prefill_tiles / shape.num_prefills
        )
        return (
            self.launch_s
            + self.per_grid_block_s * grid
            + smooth_max_of_two(compute_s, stream_s, self.stream_power)
        )

    def column_seconds(self, c: Columns) -> Array:
        """Only where there is a chunk; elsewhere the result means nothing."""
        overhead = self.tile_overhead_tokens
        tiles = c.num_prefill_tiles + c.num_decodes
        walked = c.prefill_tile_tokens + c.decode_context_tokens + overhead * tiles
        longest = c.max_context_tokens + overhead
        waves = tiles / self.tiles_per_wave
        walk_s = self.per_walked_token_s * longest
        work_s = self.per_tile_token_s * walked * np.maximum(0, 1 - self.saturation / waves)
        compute_s = smooth_max(walk_s, work_s, self.overlap_power)
        evenness = walked / (tiles * longest)
        quantum_s = walk_s * np.ceil(evenness * waves - 1e-9)
        compute_s += (quantum_s - compute_s) * evenness ** (self.wave_power * (1 + waves))
        tokens = c.prefill_context_tokens + c.decode_context_tokens
        rereads = np.clip(self.group_size * tiles / self.reread_tiles, 1, self.group_size)
        spilt = (self.l2_tokens / tokens) ** 4
        stream_s = self.per_streamed_token_s * tokens * (1 + (rereads - 1) / (1 + spilt))
        grid = c.num_reqs * c.num_prefill_tiles / np.maximum(1, c.num_prefills)
        return np.asarray(
            self.launch_s
            + self.per_grid_block_s * grid
            + smooth_max(compute_s, stream_s, self.stream_power)
        )


def joint_parameters(decode: DecodeAttention, tiles_per_wave: float) -> tuple[Parameter, ...]:
    """What is fitted of a `JointKernel`, started from the decodes' own kernel on the same device.

    Both read the same cache, so the decodes' time per token sets the scale; the ratios are typical
    of FlashAttention-2 with heads of 128.
    """
    token_s = decode.per_context_token_s

    def around(name: str, start: float, factor: float, weight: float = 0.01) -> Parameter:
        return Parameter(name, start, start / factor, start * factor, weight)

    return (
        around("launch_s", 0.4 * decode.launch_s, 30),
        around("per_tile_token_s", 1.6 * token_s, 30),
        around("per_walked_token_s", 7 * token_s, 30),
        around("per_grid_block_s", 20 * token_s, 100),
        # The same bytes from the same memory: a cache of any size is bounded by this, so that
        # no fit on small caches can invent a cliff, or overlook one.
        around("per_streamed_token_s", 0.75 * token_s, 1.2, 1.0),
        around("tile_overhead_tokens", 150, 8),
        around("saturation", 0.75, 3),
        Parameter("overlap_power", 1.4, 1, 6),
        around("wave_power", 3, 4, 0.1),
        around("l2_tokens", 280_000, 10, 0.1),
        around("reread_tiles", 17 * tiles_per_wave, 6, 0.1),
        Parameter("stream_power", 2, 1, 8, 0.1),
    )


@dataclass(frozen=True)
class JointAttention:
    """One kernel for chunks and decodes together; decodes without a chunk have their own."""

    kind: ClassVar[str] = "joint"
    kernel: JointKernel
    decode: DecodeAttention

    def seconds(self, shape: BatchShape) -> float:
        if shape.num_prefills:
            return self.kernel.seconds(shape)
        return self.decode.seconds(shape)

    def column_seconds(self, c: Columns) -> Array:
        joint_s = self.kernel.column_seconds(c)
        return np.where(c.num_prefills > 0, joint_s, self.decode.column_seconds(c))
