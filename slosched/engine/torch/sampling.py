"""Sampling of the next token of each request, and the test whether the model ends there."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from slosched.core import Request, SamplingParams, ScheduledChunk

_GREEDY_TEMPERATURE = 1e-5
"""A temperature at or below which dividing overflows, and the draw would be the argmax anyway.
"""


class Sampler:
    """Samples greedily, or at random with one generator per request.

    A request's draws depend only on its own seed and progress, never on the other requests in its
    batch.  Without a seed of its own, it gets one derived from `seed` and the request's id.
    """

    def __init__(self, eos_token_ids: frozenset[int], device: torch.device, seed: int = 0) -> None:
        self._eos_token_ids = eos_token_ids
        self._device = device
        self._seed = seed
        self._generators: dict[str, torch.Generator] = {}

    def sample(self, chunks: Sequence[ScheduledChunk], logits: Tensor) -> list[int]:
        """Return one token for each chunk; row i of `logits` [chunks, vocabulary] is chunk i's.

        Overwrites the logits of end tokens for requests that have not reached `min_tokens`.
        """
        for row, chunk in enumerate(chunks):
            sampling = chunk.request.sampling
            if chunk.num_known_outputs < sampling.min_tokens:
                logits[row, list(self._ends(sampling))] = float("-inf")
        tokens: list[int] = logits.argmax(dim=-1).tolist()
        for row, chunk in enumerate(chunks):
            request = chunk.request
            if request.sampling.temperature > _GREEDY_TEMPERATURE:
                weights = next_token_weights(logits[row], request.sampling)
                generator = self._generator(request)
                tokens[row] = int(torch.multinomial(weights, 1, generator=generator))
        return tokens

    def is_last(self, request: Request, token_id: int) -> bool:
        """Tell whether `token_id` ends the request, apart from its output limit."""
        sampling = request.sampling
        if sampling.ignore_eos:
            return token_id in sampling.stop_token_ids
        return token_id in self._ends(sampling)

    def release(self, request_id: str) -> None:
        self._generators.pop(request_id, None)

    def _ends(self, sampling: SamplingParams) -> frozenset[int]:
        return self._eos_token_ids.union(sampling.stop_token_ids)

    def _generator(self, request: Request) -> torch.Generator:
        generator = self._generators.get(request.request_id)
        if generator is None:
            seed = request.sampling.seed
            if seed is None:
                seed = zlib.crc32(request.request_id.encode(), self._seed)
            generator = torch.Generator(self._device).manual_seed(seed)
            self._generators[request.request_id] = generator
        return generator


def next_token_weights(logits: Tensor, sampling: SamplingParams) -> Tensor:
    """Return unnormalized odds [vocabulary] after temperature, top-k and top-p, in vLLM's order.

    Top-p keeps the smallest set of most likely tokens that holds at least `top_p`; `top_k` 0 and
    `top_p` 1 keep everything.
    """
    scaled = logits.float() / sampling.temperature
    if 0 < sampling.top_k < scaled.shape[-1]:
        least = scaled.topk(sampling.top_k).values[-1]
        scaled = scaled.masked_fill(scaled < least, float("-inf"))
    probabilities = scaled.softmax(dim=-1)
    if sampling.top_p < 1:
        ordered, order = probabilities.sort(descending=True)
        before = ordered.cumsum(dim=-1) - ordered
        # The most likely token stays even with top_p 0.
        ordered = ordered.masked_fill((before >= sampling.top_p) & (before > 0), 0.0)
        probabilities = torch.zeros_like(probabilities).scatter_(0, order, ordered)
    return probabilities
