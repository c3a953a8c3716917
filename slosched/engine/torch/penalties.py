"""Logits that a request changes: its bias on some tokens, and penalties on those it has had.

Source: OpenAI's API reference (`logit_bias`, `presence_penalty`, `frequency_penalty`) and, for
`repetition_penalty` and the order, vLLM 0.32 (`vllm/v1/sample`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from slosched.core import SamplingParams

_NEW_ROWS = 64


class TokenCounts:
    """Counts how often each token is in an output, one token after the other.

    Nothing is counted anew when a token comes, so that a long output costs no more than its
    different tokens do.
    """

    def __init__(self, absent: Iterable[int] = ()) -> None:
        """Begin with the tokens of `absent`, which have a row although no output has them."""
        self._rows = {token: row for row, token in enumerate(absent)}
        self._tokens = np.array(list(self._rows), dtype=np.int64)
        self._counts = np.zeros(len(self._rows), dtype=np.int64)

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, token: int) -> None:
        row = self._rows.setdefault(token, len(self._rows))
        if row == len(self._tokens):
            room = max(_NEW_ROWS, row)
            self._tokens = np.concatenate((self._tokens, np.zeros(room, dtype=np.int64)))
            self._counts = np.concatenate((self._counts, np.zeros(room, dtype=np.int64)))
        self._tokens[row] = token
        self._counts[row] += 1

    def with_more(self, tokens: Sequence[int]) -> TokenCounts:
        """Return the counts with more tokens; these counts stay as they are."""
        if not tokens:
            return self
        more = TokenCounts()
        more._rows = self._rows.copy()
        more._tokens, more._counts = self._tokens.copy(), self._counts.copy()
        for token in tokens:
            more.add(token)
        return more

    def on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the tokens, each once, and how often each is in the output.

        On a CPU both are views, which the next token may change.
        """
        tokens, counts = (array[: len(self)] for array in (self._tokens, self._counts))
        return torch.from_numpy(tokens).to(device), torch.from_numpy(counts).to(device)


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
    seen: TokenCounts
    """The tokens of the output so far and, where repetition is penalised, of the prompt."""

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
            seen=TokenCounts(prompt),
        )

    def accept(self, token: int) -> None:
        """Note the next token of the output."""
        self.seen.add(token)

    def apply(self, logits: Tensor, drafts: Sequence[int] = ()) -> None:
        """Change the logits [vocabulary] of the token that comes after output and drafts."""
        if len(self.biased):
            logits[self.biased] += self.bias.to(logits.dtype)
        tokens, counts = self.seen.with_more(drafts).on(logits.device)
        if not len(tokens):
            return
        values = logits[tokens]
        if self.repetition != 1:
            values = torch.where(values > 0, values / self.repetition, values * self.repetition)
        if self.presence or self.frequency:
            penalty = (self.presence + self.frequency * counts).to(logits.dtype)
            values = torch.where(counts > 0, values - penalty, values)
        logits[tokens] = values
