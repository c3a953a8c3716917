"""Distributions of prompt and output lengths, drawn in pairs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]


class LengthDistribution(Protocol):
    """Lengths in tokens, each at least 1."""

    def draw(self, size: int, rng: np.random.Generator) -> IntArray:
        """Draw lengths in tokens, of shape (size,)."""


class LengthPairs(Protocol):
    """Prompt and output lengths of the same requests."""

    def draw(self, size: int, rng: np.random.Generator) -> tuple[IntArray, IntArray]:
        """Draw prompt tokens and output tokens, each of shape (size,)."""


@dataclass(frozen=True, slots=True)
class Fixed:
    """One fixed length: every request has `tokens` tokens."""

    tokens: int

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ValueError(f"a length must be at least 1 token, not {self.tokens!r}")

    def draw(self, size: int, rng: np.random.Generator) -> IntArray:  # noqa: ARG002  # the protocol
        return np.full(size, self.tokens, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Lognormal:
    """Lognormal lengths of the given mean and coefficient of variation, rounded, at least 1."""

    mean_tokens: float
    cv: float = 1.0

    def __post_init__(self) -> None:
        if not 1 <= self.mean_tokens < math.inf:
            raise ValueError(f"mean_tokens must be at least 1, not {self.mean_tokens!r}")
        if not 0 <= self.cv < math.inf:
            raise ValueError(f"cv must be finite and not negative, not {self.cv!r}")

    def draw(self, size: int, rng: np.random.Generator) -> IntArray:
        variance = math.log1p(self.cv**2)
        drawn = rng.lognormal(math.log(self.mean_tokens) - variance / 2, math.sqrt(variance), size)
        return _whole_tokens(drawn)


@dataclass(frozen=True, slots=True)
class IndependentLengths:
    """Prompt and output lengths that are drawn independently of each other."""

    prompt: LengthDistribution
    output: LengthDistribution

    def draw(self, size: int, rng: np.random.Generator) -> tuple[IntArray, IntArray]:
        return self.prompt.draw(size, rng), self.output.draw(size, rng)


@dataclass(frozen=True, slots=True)
class QuantileLengths:
    """Prompt lengths by their quantiles, and output lengths by their quantiles in each prompt bin.

    The bins divide the prompts into equal shares, shortest first.  A table of conditional quantiles
    keeps a dependence that rises and falls again, for which a single correlation would be zero.  In
    Azure's conversations, for example, prompts of middling length get the long answers.
    """

    prompt_levels: tuple[float, ...]
    prompt_quantiles: tuple[int, ...]
    output_levels: tuple[float, ...]
    output_quantiles: tuple[tuple[int, ...], ...]
    """One row for each prompt bin."""

    def draw(self, size: int, rng: np.random.Generator) -> tuple[IntArray, IntArray]:
        prompt_u, output_u = rng.random(size), rng.random(size)
        prompts = np.interp(prompt_u, self.prompt_levels, self.prompt_quantiles)
        bins = (prompt_u * len(self.output_quantiles)).astype(np.int64)
        outputs = np.empty(size)
        for i, quantiles in enumerate(self.output_quantiles):
            inside = bins == i
            outputs[inside] = np.interp(output_u[inside], self.output_levels, quantiles)
        return _whole_tokens(prompts), _whole_tokens(outputs)


def _whole_tokens(lengths: npt.NDArray[np.float64]) -> IntArray:
    return np.maximum(np.rint(lengths), 1).astype(np.int64)
