"""The shape of a step, and the protocol of the models that predict its time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

ATTENTION_TILE_TOKENS = 64
"""Query rows that one thread block of an attention kernel works on: FlashAttention-2's usual size.

It is a constant of the latency models' forms, not a setting of a kernel."""
_HALF_TILE_TOKENS = ATTENTION_TILE_TOKENS // 2


class BatchShape:
    """The sums and maxima on which the time of a step depends; adding a request is O(1).

    It holds all features that any form of latency model uses, and it is the one class of the core
    that computes: it adds up what requests contribute, because a policy asks for the time of a step
    hundreds of times while it plans one.

    A request that computes one token is a decode, any other is a prefill chunk.  So do
    `Request.is_decode` and attention kernels tell them apart.  A decode that verifies draft tokens
    is added by `add_drafting`.
    """

    __slots__ = (
        "decode_context_tokens",
        "max_context_tokens",
        "max_decode_context_tokens",
        "num_decodes",
        "num_draft_tokens",
        "num_prefill_tiles",
        "num_prefill_tokens",
        "num_prefills",
        "num_swapped_blocks",
        "prefill_attention_tokens",
        "prefill_context_tokens",
        "prefill_tile_tokens",
        "squared_chunk_tokens",
    )

    def __init__(self) -> None:
        self.num_prefill_tokens = 0
        """t: tokens of all prefill chunks."""
        self.num_prefills = 0
        self.num_decodes = 0
        """Bd: number of decodes."""
        self.prefill_attention_tokens = 0
        """t2: sum of chunk * (prior + (chunk + 1) / 2), the exact (query, key) pairs."""
        self.squared_chunk_tokens = 0
        """Sum of chunk**2: the t2 of the linear formula (docs/latency-model.md), for comparison."""
        self.prefill_context_tokens = 0
        """Sum of prior + chunk over the chunks: the keys that their attention reads."""
        self.num_prefill_tiles = 0
        """Sum of ceil(chunk / 64): the tiles of query rows that an attention kernel works on."""
        self.prefill_tile_tokens = 0
        """Sum over these tiles of the keys that each reads, up to its own last row."""
        self.decode_context_tokens = 0
        """t3: sum of the context lengths of the decodes, including the token that each computes."""
        self.max_context_tokens = 0
        """Longest context of all requests, including the tokens of this step."""
        self.max_decode_context_tokens = 0
        self.num_draft_tokens = 0
        """Draft tokens that the decodes verify beside the one token that each computes."""
        self.num_swapped_blocks = 0
        """KV blocks copied between device and host, both ways."""

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens that the step computes."""
        return self.num_prefill_tokens + self.num_decodes + self.num_draft_tokens

    @property
    def num_reqs(self) -> int:
        """Return the number of requests in the step."""
        return self.num_prefills + self.num_decodes

    def add(self, num_new_tokens: int, num_prior_tokens: int) -> None:
        """Add a request that computes `num_new_tokens` on top of `num_prior_tokens` cached ones."""
        context = num_prior_tokens + num_new_tokens
        if num_new_tokens == 1:
            self.num_decodes += 1
            self.decode_context_tokens += context
            if context > self.max_decode_context_tokens:
                self.max_decode_context_tokens = context
        else:
            # Full tile i reads prior + 64 i keys, i = 1 … full; a last, shorter one reads all.
            tiles = num_new_tokens // ATTENTION_TILE_TOKENS
            walked = tiles * (num_prior_tokens + (tiles + 1) * _HALF_TILE_TOKENS)
            if num_new_tokens % ATTENTION_TILE_TOKENS:
                tiles += 1
                walked += context
            squared = num_new_tokens * num_new_tokens
            self.num_prefills += 1
            self.num_prefill_tokens += num_new_tokens
            self.prefill_attention_tokens += (
                num_new_tokens * num_prior_tokens + (squared + num_new_tokens) // 2
            )
            self.squared_chunk_tokens += squared
            self.prefill_context_tokens += context
            self.num_prefill_tiles += tiles
            self.prefill_tile_tokens += walked
        if context > self.max_context_tokens:
            self.max_context_tokens = context

    def add_drafting(self, num_draft_tokens: int, num_prior_tokens: int) -> None:
        """Add a decode that verifies drafts on top of `num_prior_tokens` cached tokens.

        It counts as a decode, not as a chunk: attention reads its context once for all its tokens,
        as decode kernels do for a few queries (vLLM's `reorder_batch_threshold`).
        """
        self.add(1, num_prior_tokens)
        self.lengthen_decodes(num_draft_tokens)
        longest = num_prior_tokens + 1 + num_draft_tokens
        self.max_decode_context_tokens = max(self.max_decode_context_tokens, longest)
        self.max_context_tokens = max(self.max_context_tokens, longest)

    def lengthen_decodes(self, num_draft_tokens: int) -> None:
        """Add draft tokens to the decodes; the longest contexts stay as they are."""
        self.num_draft_tokens += num_draft_tokens
        self.decode_context_tokens += num_draft_tokens

    def lengthen_contexts(self) -> None:
        """Make the next step of the same decodes of this one: each context has a token more."""
        self.decode_context_tokens += self.num_decodes
        self.max_decode_context_tokens += 1
        self.max_context_tokens += 1

    def add_decodes(self, contexts: Sequence[int]) -> None:
        """Add decodes by their context lengths, which include the token that each computes."""
        self.num_decodes += len(contexts)
        self.decode_context_tokens += sum(contexts)
        longest = max(contexts)
        self.max_decode_context_tokens = max(self.max_decode_context_tokens, longest)
        self.max_context_tokens = max(self.max_context_tokens, longest)

    @property
    def sums(self) -> tuple[int, ...]:
        """Return all values, with which `restore` takes back what is added after this."""
        return (
            self.num_prefill_tokens,
            self.num_prefills,
            self.num_decodes,
            self.prefill_attention_tokens,
            self.squared_chunk_tokens,
            self.prefill_context_tokens,
            self.num_prefill_tiles,
            self.prefill_tile_tokens,
            self.decode_context_tokens,
            self.max_context_tokens,
            self.max_decode_context_tokens,
            self.num_draft_tokens,
            self.num_swapped_blocks,
        )

    def restore(self, sums: tuple[int, ...]) -> None:
        """Make this shape what it was when it returned `sums`."""
        (
            self.num_prefill_tokens,
            self.num_prefills,
            self.num_decodes,
            self.prefill_attention_tokens,
            self.squared_chunk_tokens,
            self.prefill_context_tokens,
            self.num_prefill_tiles,
            self.prefill_tile_tokens,
            self.decode_context_tokens,
            self.max_context_tokens,
            self.max_decode_context_tokens,
            self.num_draft_tokens,
            self.num_swapped_blocks,
        ) = sums

    def copy(self) -> BatchShape:
        """Return a shape of the same values."""
        twin = BatchShape.__new__(BatchShape)
        twin.restore(self.sums)
        return twin

    def as_dict(self) -> dict[str, int]:
        """Return all values by name."""
        return {name: getattr(self, name) for name in self.__slots__}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BatchShape) and self.as_dict() == other.as_dict()

    __hash__ = None  # type: ignore[assignment]  # mutable

    def __repr__(self) -> str:
        inside = ", ".join(f"{name}={value}" for name, value in self.as_dict().items() if value)
        return f"BatchShape({inside})"


class LatencyModel(Protocol):
    """A prediction of the time of a step.  Adding to a shape never makes the step faster.

    There is one exception, which devices show as well: a kernel that takes chunks and decodes at
    once may be a little faster than the kernel for decodes alone, by 2 % at most in the bundled
    models.  Then a first, tiny chunk may seem to cost nothing.
    """

    def predict(self, shape: BatchShape) -> float:
        """Return the expected seconds of a step of this shape."""

    def predict_upper(self, shape: BatchShape) -> float:
        """Return the seconds that at most 1 % of such steps exceed; never less than `predict`."""

    def predict_prefill(self, num_new_tokens: int, num_prior_tokens: int = 0) -> float:
        """Return the seconds of a step with this one chunk alone, from a cache where possible."""

    def observe(self, shape: BatchShape, seconds: float) -> None:
        """Learn from a step that was executed."""
