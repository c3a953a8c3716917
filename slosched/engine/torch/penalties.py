"""Logits that a request changes: its bias on some tokens, and penalties on those it has had.

Source: OpenAI's API reference (`logit_bias`, `presence_penalty`, `frequency_penalty`) and, for
`repetition_penalty` and the order, vLLM 0.32 (`vllm/v1/sample`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slosched.core import SamplingParams


@dataclass(frozen=True, slots=True)
class Penalties:
    """What a request adds to the logits of some tokens, and takes from those of others."""

    biased: Tensor
    """The tokens that have a bias."""
    bias: Tensor
    presence: float
    """Taken from the logit of each token that is in the output."""
    frequency: float
    """Taken as many times as the token is in the output."""
    repetition: float
    """What divides the logit of each token of prompt and output if it is positive, and multiplies
    it if it is negative."""
    prompt: Tensor
    """The tokens of the prompt that are penalised, each once."""

    @staticmethod
    def of(
        sampling: SamplingParams, prompt_token_ids: Sequence[int] | None, device: torch.device
    ) -> Penalties | None:
        """Return the penalties of a request; None if it has neither penalties nor a bias."""
        if not (sampling.logit_bias or sampling.has_penalties):
            return None
        prompt: Iterable[int] = ()
        if sampling.repetition_penalty != 1 and prompt_token_ids is not None:
            prompt = dict.fromkeys(prompt_token_ids)
        biased, bias = zip(*sampling.logit_bias, strict=True) if sampling.logit_bias else ((), ())
        return Penalties(
            biased=torch.tensor(biased, dtype=torch.long, device=device),
            bias=torch.tensor(bias, dtype=torch.float32, device=device),
            presence=sampling.presence_penalty,
            frequency=sampling.frequency_penalty,
            repetition=sampling.repetition_penalty,
            prompt=torch.tensor(list(prompt), dtype=torch.long, device=device),
        )

    def apply(self, logits: Tensor, outputs: Sequence[int]) -> None:
        """Change the logits [vocabulary] of the token that comes after `outputs`."""
        if len(self.biased):
            logits[self.biased] += self.bias.to(logits.dtype)
        counts = Counter(outputs)
        tokens = torch.tensor(list(counts), dtype=torch.long, device=logits.device)
        if self.repetition != 1:
            seen = torch.cat((self.prompt, tokens)).unique()
            values = logits[seen]
            lower = torch.where(values > 0, values / self.repetition, values * self.repetition)
            logits[seen] = lower
        if counts and (self.presence or self.frequency):
            numbers = torch.tensor(list(counts.values()), device=logits.device)
            logits[tokens] -= (self.presence + self.frequency * numbers).to(logits.dtype)
