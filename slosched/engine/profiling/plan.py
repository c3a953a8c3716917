"""The batches to measure: few, from every regime, and at the edges where step times jump."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np

from slosched.perfmodel.measurement import Chunk

_EDGES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 65, 96, 128, 129, 192, 256, 257, 384, 512, 513)
"""Token counts at which step times jump: the tiles of GEMMs and the sizes of CUDA graphs."""
_SHORT_CONTEXT = 32
_PURE_SHARE = 0.25
"""The share of the plan that is decodes alone, and the share that is chunks alone."""


@dataclass(frozen=True)
class ProfileLimits:
    """The limits within which the batches of a plan have to stay."""

    max_num_batched_tokens: int
    max_num_seqs: int
    max_context_tokens: int
    """The longest context of one request."""
    num_blocks: int
    block_size: int
    num_host_blocks: int = 0

    def fits(self, chunks: Sequence[Chunk], num_swapped_blocks: int = 0) -> bool:
        blocks = num_swapped_blocks + sum(
            -(-(new + prior) // self.block_size) for new, prior in chunks
        )
        return (
            sum(new for new, _ in chunks) <= self.max_num_batched_tokens
            and len(chunks) <= self.max_num_seqs
            and all(new + prior <= self.max_context_tokens for new, prior in chunks)
            and blocks <= self.num_blocks
            and num_swapped_blocks <= self.num_host_blocks
        )


@dataclass(frozen=True)
class PlannedBatch:
    """A batch to measure."""

    chunks: tuple[Chunk, ...]
    num_swapped_blocks: int = 0
    swaps_in: bool = False
    """True if the copies go from the host to the device, False if from the device to the host."""


def plan_batches(
    limits: ProfileLimits, *, num_batches: int = 120, seed: int = 0
) -> list[PlannedBatch]:
    """Return about `num_batches` batches, ordered so that even the first few cover every regime.

    A quarter are decodes alone.  A quarter are chunks alone, at the edges of tiles and in long
    contexts.  Some are swaps of several sizes in both directions.  All others are mixes that fill
    the space of chunks, contexts and decodes evenly on a logarithmic scale (a scrambled Sobol
    sequence).  The mixes include the shapes on which models err most: one long decode among many
    short ones, a long decode next to a tiny chunk, a full KV cache.  Raises ValueError if
    `num_batches` is below 1.
    """
    if num_batches < 1:
        raise ValueError(f"a plan needs at least one batch, not {num_batches}")
    num_pure = max(1, round(_PURE_SHARE * num_batches))
    rng = np.random.default_rng(seed)
    prefills = _spread(_fitting(limits, _prefills(limits)), num_pure, rng)
    decodes = _spread(_fitting(limits, _decodes(limits)), num_pure, rng)
    swaps = [b for b in _swaps(limits) if limits.fits(b.chunks, b.num_swapped_blocks)]
    num_mixes = max(1, num_batches - len(prefills) - len(decodes) - len(swaps))
    mixes = _mixes(limits, num_mixes, seed)
    # Mixes take two columns of five because there are about twice as many of them.
    columns = (
        [PlannedBatch(b) for b in kind] for kind in (mixes[::2], prefills, decodes, mixes[1::2])
    )
    rounds = zip_longest(*columns, swaps)
    return [batch for group in rounds for batch in group if batch is not None][:num_batches]


def reference_batch(limits: ProfileLimits) -> PlannedBatch:
    """Return a batch of short decodes, whose repeated runs show how the machine's speed changes."""
    count = min(8, limits.max_num_seqs, limits.max_num_batched_tokens)
    context = min(_SHORT_CONTEXT, limits.max_context_tokens - 1)
    while count > 1 and not limits.fits(((1, context),) * count):
        count -= 1
    return PlannedBatch(((1, context),) * count)


def _fitting(
    limits: ProfileLimits, batches: Iterator[tuple[Chunk, ...]]
) -> list[tuple[Chunk, ...]]:
    return [b for b in dict.fromkeys(batches) if b and limits.fits(b)]


def _spread(
    batches: list[tuple[Chunk, ...]], count: int, rng: np.random.Generator
) -> list[tuple[Chunk, ...]]:
    """Return `count` of the batches, evenly spaced from smallest to largest, in random order."""
    if not batches:
        return []
    positions = np.unique(np.linspace(0, len(batches) - 1, count).round().astype(int))
    return [batches[i] for i in rng.permutation(positions)]


def _doubling(first: int, last: int) -> list[int]:
    """Return first, 2 first, 4 first, … up to last, which is always included."""
    values = []
    while first < last:
        values.append(first)
        first *= 2
    return [*values, last]


def _prefills(limits: ProfileLimits) -> Iterator[tuple[Chunk, ...]]:
    longest = min(limits.max_num_batched_tokens, limits.max_context_tokens)
    edges = {e for e in (*_EDGES, *_doubling(1024, longest)) if 2 <= e <= longest} | {longest}
    for new in sorted(edges):
        yield ((new, 0),)
        # Time each count of tokens behind a long context, too, and split into two prompts.
        for prior in (1024, limits.max_context_tokens - new):
            yield ((new, max(0, prior)),)
        if new >= 32:
            yield ((new // 2, 0), (new - new // 2, 0))


def _decodes(limits: ProfileLimits) -> Iterator[tuple[Chunk, ...]]:
    most = min(limits.max_num_seqs, limits.max_num_batched_tokens)
    longest = limits.max_context_tokens - 1
    for count in sorted({*_doubling(1, most), *(e for e in _EDGES if e <= most)}):
        fill = limits.num_blocks // count * limits.block_size - 1
        for prior in dict.fromkeys((_SHORT_CONTEXT, 256, 1024, 4096, min(fill, longest))):
            if 0 < prior <= min(fill, longest):
                yield ((1, prior),) * count
        if count > 1:  # one long context among many short ones
            yield ((1, longest), *((1, _SHORT_CONTEXT),) * (count - 1))


def _mixes(limits: ProfileLimits, count: int, seed: int) -> list[tuple[Chunk, ...]]:
    from scipy.stats import qmc  # takes half a second to import, which only a plan should pay

    points = qmc.Sobol(d=7, rng=np.random.default_rng(seed)).random_base2(
        max(1, (2 * count - 1).bit_length())
    )
    mixes = _fitting(limits, (_mix(limits, point.tolist()) for point in points))
    return [*_fitting(limits, _corners(limits)), *mixes][:count]


def _corners(limits: ProfileLimits) -> Iterator[tuple[Chunk, ...]]:
    """Yield the mixes at the corners of the space of mixes."""
    longest = limits.max_context_tokens - 1
    budget, seqs = limits.max_num_batched_tokens, limits.max_num_seqs
    tiny = min(16, budget - 1)
    if tiny < 2 or seqs < 2:
        return
    yield ((tiny, 0), (1, longest))
    many = min(seqs, budget - tiny + 1) - 1
    yield ((tiny, 0), *((1, _SHORT_CONTEXT),) * many)
    yield ((max(2, budget - many), 0), *((1, _SHORT_CONTEXT),) * many)
    yield ((tiny, max(0, limits.max_context_tokens - tiny)), (1, _SHORT_CONTEXT))


def _mix(limits: ProfileLimits, point: Sequence[float]) -> tuple[Chunk, ...]:
    """Return the chunks and decodes of a point in the unit cube.

    Sizes are logarithmic and cut to fit the limits.  The result is empty if nothing fits.
    """
    how_many, tokens, prior, num_decodes, context, unevenness, filled = point

    def size(share: float, low: int, high: int) -> int:
        return int(low * (max(low, high) / low) ** share)

    budget, seqs = limits.max_num_batched_tokens, limits.max_num_seqs
    if budget < 3 or seqs < 2:
        return ()
    room_tokens = limits.num_blocks * limits.block_size
    wanted = size(num_decodes, 1, min(seqs - 1, budget - 2))
    new = size(tokens, 2, min(budget - wanted, limits.max_context_tokens))
    num_chunks = min(1 + int(4 * how_many**2), max(1, new // 2), seqs - wanted)
    # A third of the prompts are at their start, the others anywhere.
    done = 0 if prior < 1 / 3 else size(1.5 * prior - 0.5, 16, limits.max_context_tokens - new)
    chunks: list[Chunk] = [(new // num_chunks, done if i == 0 else 0) for i in range(num_chunks)]
    left = (room_tokens - sum(n + p + limits.block_size for n, p in chunks)) // wanted
    longest = min(limits.max_context_tokens - 1, left - limits.block_size)
    if longest < 1:
        return ()
    # A quarter of the mixes fill the KV cache as far as the longest context allows.
    mean = longest if filled > 0.75 else size(context, min(8, longest), longest)
    shortest = max(1, int(mean * (1 - unevenness)))
    decodes = [
        (1, int(c)) for c in np.linspace(shortest, min(longest, 2 * mean - shortest), wanted)
    ]
    return (*chunks, *decodes)


def _swaps(limits: ProfileLimits) -> Iterator[PlannedBatch]:
    """Yield one decode with copies of several sizes, out to the host and back in."""
    largest = min(limits.num_host_blocks, limits.num_blocks - 4, 256)
    if largest >= 4:
        for num_blocks in dict.fromkeys(
            (largest, largest // 4, largest // 2, max(4, largest // 16))
        ):
            for swaps_in in (False, True):
                # Rows are identified by chunks and blocks, so the two directions differ by one
                # token.
                yield PlannedBatch(((1, _SHORT_CONTEXT + swaps_in),), num_blocks, swaps_in)
