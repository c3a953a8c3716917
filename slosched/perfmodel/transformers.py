"""The sizes of some public models: their numbers of weights, and of bytes in the KV cache."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

BYTES_PER_NUMBER = 2
"""Bytes of a bfloat16 number, such as a weight or an element of a key or value."""


@dataclass(frozen=True, slots=True)
class Transformer:
    """A dense decoder with gated feed-forward layers and grouped-query attention."""

    num_layers: int
    hidden: int
    num_query_heads: int
    num_kv_heads: int
    head: int
    feed_forward: int
    vocabulary: int
    max_context_tokens: int
    """The longest context that the model was made for: max_position_embeddings."""
    ties_embeddings: bool = False
    """Whether the language head is the matrix of the embeddings, too."""

    @property
    def layer_weights(self) -> int:
        """Return the number of weights of all layers, with which every token is multiplied."""
        queries, keys = self.num_query_heads * self.head, self.num_kv_heads * self.head
        attention = self.hidden * (2 * queries + 2 * keys)
        return self.num_layers * (attention + 3 * self.hidden * self.feed_forward)

    @property
    def head_weights(self) -> int:
        """Return the weights of the language head; only tokens that emit a next token need it."""
        return self.hidden * self.vocabulary

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of all weights: layers, language head and embeddings."""
        num_matrices = 1 if self.ties_embeddings else 2
        return BYTES_PER_NUMBER * (self.layer_weights + num_matrices * self.head_weights)

    @property
    def kv_bytes_per_token(self) -> int:
        """Return the bytes of the keys and values of one token in all layers."""
        return 2 * BYTES_PER_NUMBER * self.num_layers * self.num_kv_heads * self.head


MODELS = {
    "Llama-3.1-8B": Transformer(32, 4096, 32, 8, 128, 14336, 128256, 131072),
    "Llama-3.1-70B": Transformer(80, 8192, 64, 8, 128, 28672, 128256, 131072),
    "Llama-3.2-3B": Transformer(28, 3072, 24, 8, 128, 8192, 128256, 131072, ties_embeddings=True),
    "Qwen3-8B": Transformer(36, 4096, 32, 8, 128, 12288, 151936, 40960),
    "Qwen3-32B": Transformer(64, 5120, 64, 8, 128, 25600, 151936, 40960),
}
"""Models by the end of their names.  Source: config.json of each on the Hugging Face hub."""


def known_transformer(provenance: Mapping[str, str]) -> Transformer | None:
    """Return the sizes of the model that a latency model was measured on.

    Returns None if they are not known here, or if weights and KV cache were not bfloat16.
    """
    named = re.sub("^Meta-", "", provenance.get("model", "").rpartition("/")[2])
    # A composed profile says "vLLM, bfloat16, …" if all is stored so, or else names each part.
    dtypes = (provenance.get("dtype"), *provenance.get("engine", "").split(", "))
    return MODELS.get(named) if "bfloat16" in dtypes else None
