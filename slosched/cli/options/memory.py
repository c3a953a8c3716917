"""The options for the KV cache and the prefix cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from slosched.kv import Eviction, HostWrites, PrefixCaching, PrefixHost

PrefixCache = Annotated[
    PrefixCaching,
    typer.Option(
        help="Whether prompts with a common prefix share KV blocks, also with requests that have "
        "ended.  hash finds prefixes by block hashes, as in vLLM; merged does, too, and merges "
        "equal blocks, as in vLLM V0; radix uses a radix tree, as in SGLang."
    ),
]
PrefixCacheEviction = Annotated[
    Eviction,
    typer.Option(
        help="What --prefix-cache hash evicts first when it needs room.  lru: what was left "
        "longest ago, as in vLLM; ttl: what has outlived the time for which it was worth its "
        "memory, as in Continuum; tail_lru: tails that a turn can do without; saga: what is idle "
        "for long, unlikely to come back and large, as in SAGA; saved_time: what is likely to save "
        "the least device time; belady: what is used again last, in the simulator alone."
    ),
]
PrefixHostTokens = Annotated[
    int,
    typer.Option(
        min=0,
        help="Tokens of host memory for KV blocks that --prefix-cache evicts from the device: "
        "100000.  When a prompt needs them again, they are copied back.",
    ),
]
PrefixHostWrites = Annotated[
    HostWrites,
    typer.Option(
        help="When blocks are copied to the host memory of --prefix-host-tokens: as the device "
        "evicts them, or as soon as they are computed."
    ),
]


def prefix_host(
    prefix_cache: PrefixCaching, num_tokens: int, writes: HostWrites, block_size: int
) -> PrefixHost:
    """Return the host memory of the prefix cache; ValueError if there is no prefix cache for it."""
    if num_tokens and prefix_cache is PrefixCaching.OFF:
        raise ValueError(
            "--prefix-host-tokens keeps what a prefix cache evicts: choose one with "
            "--prefix-cache hash, merged or radix"
        )
    return PrefixHost(_blocks("--prefix-host-tokens", num_tokens, block_size), writes)


_MAX_BLOCKS = 2**26
"""A billion tokens in blocks of 16, which is more than any device holds. A list of more blocks
would take gigabytes."""


def _blocks(option: str, num_tokens: int, block_size: int) -> int:
    """Return the whole KV blocks in `num_tokens`; raise ValueError above `_MAX_BLOCKS`."""
    num_blocks = num_tokens // block_size
    if num_blocks > _MAX_BLOCKS:
        raise ValueError(
            f"{option} {num_tokens} takes {num_blocks:,} KV blocks of {block_size} tokens; "
            f"give at most {_MAX_BLOCKS * block_size}"
        )
    return num_blocks


@dataclass(frozen=True)
class KVOptions:
    """The options for the size of the KV cache."""

    kv_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, help="Tokens that the KV cache holds: 100000.  Default: what memory allows."
        ),
    ] = None
    host_kv_tokens: Annotated[
        int,
        typer.Option(
            min=0, help="Tokens of KV cache in host memory, for --preemption swap: 100000."
        ),
    ] = 0
    block_size: Annotated[int, typer.Option(min=1, help="Tokens in one KV block.")] = 16

    @property
    def num_host_blocks(self) -> int:
        return _blocks("--host-kv-tokens", self.host_kv_tokens, self.block_size)

    def num_blocks(self, default_tokens: int) -> int:
        """Return the number of KV blocks, which hold `default_tokens` if no size was given."""
        tokens = default_tokens if self.kv_tokens is None else self.kv_tokens
        if tokens < self.block_size:
            raise ValueError(
                f"a KV cache of {tokens} tokens does not hold one block of {self.block_size}: "
                "raise --kv-tokens or lower --block-size"
            )
        return _blocks("--kv-tokens", tokens, self.block_size)
