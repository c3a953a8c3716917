"""How fast prompts go through in a steady state, in which as many requests end as start."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from slosched.core import BatchShape, LatencyModel

_NUM_TRIED = 3
"""Steps that the latency model is asked for to find one as long as a TPOT."""
_MOST_STEPS = 64
"""Steps of which one is long, at most."""
_SPARE = 0.05
"""Share of a TPOT by which such steps stay below it on average, since decodes get ahead first."""
_LEAST_GAIN = 1.1
"""Factor by which prompts must go faster in long steps."""
_MOST_CHUNKS = 8
"""Chunks among which the prompt tokens of a step are divided, at most."""
_LEAST_TOKENS = 64
"""Prompt tokens for which every step has time: a matrix kernel's tile."""


class _Times:
    """Times that become longer with a number, such as those of steps."""

    def __init__(self, time_s: Callable[[float], float], least: float, most: float) -> None:
        self._time_s = time_s
        self.least, self.least_s = least, time_s(least)
        self.most, self.most_s = most, time_s(most)

    def within(self, limit_s: float) -> tuple[float, float]:
        """Return about the largest number whose time is `limit_s`, and its time.

        It is `most` if that takes less, and 0 if `least` takes longer.
        """
        low, low_s, high, high_s = self.least, self.least_s, self.most, self.most_s
        if high_s <= limit_s:
            return high, high_s
        if low_s > limit_s:
            return 0.0, limit_s
        for _ in range(_NUM_TRIED):
            num = low + (high - low) * (limit_s - low_s) / (high_s - low_s)
            time_s = self._time_s(num)
            if time_s <= limit_s:
                low, low_s = num, time_s
            else:
                high, high_s = num, time_s
        return low + (high - low) * (limit_s - low_s) / (high_s - low_s), limit_s


@dataclass
class Steady:
    """A stream of requests of which as many end as start.

    Each step then has as many prompt tokens and as many decodes as the mean request has prompt and
    output tokens, times the requests that start in it on average.
    """

    prompt_tokens: float
    """Tokens of the mean prompt."""
    output_tokens: float
    """Tokens of the mean answer."""
    model: LatencyModel
    budget_tokens: int
    """The most tokens of a step."""
    has_long_steps: bool = False
    """Whether a step may be longer than a TPOT if others make up for it (kit/long_steps.py)."""
    cached_tokens: float = 0.0
    """Tokens before those of the mean prompt, which are in the KV cache when it arrives."""

    def tokens_per_s(self, tpot_s: float) -> float:
        """Return the most prompt tokens in a second while steps take no longer than `tpot_s`.

        They may do so on average if there are long steps and prompts go faster then.
        """
        within = self._tokens_within(tpot_s)
        num, full_s = self._within.most, self._within.most_s
        if not self.has_long_steps or num * self.prompt_tokens / full_s <= _LEAST_GAIN * within:
            return within
        share, mean_s = self._in_turns.within((1 - _SPARE) * tpot_s)
        in_turns = share * (self.budget_tokens - self._num_decodes(share)) / mean_s
        return in_turns if in_turns > _LEAST_GAIN * within else within

    @cached_property
    def _within(self) -> _Times:
        """Return the times of steps by the number of requests that start in them."""
        num = 1 / (self.prompt_tokens + self.output_tokens)
        return _Times(self._step_s, num, num * self.budget_tokens)

    @cached_property
    def _in_turns(self) -> _Times:
        """Return the mean times of full steps and others by the share of full ones."""
        return _Times(self._mean_s, 1 / _MOST_STEPS, 1.0)

    def _tokens_within(self, tpot_s: float) -> float:
        """Return the prompt tokens in a second if no step is longer than `tpot_s`."""
        num, step_s = self._within.within(tpot_s)
        return num * self.prompt_tokens / step_s

    def _num_decodes(self, share: float) -> int:
        """Return the decodes of steps of which this share is full; the others hold no prompt."""
        started = self.budget_tokens / (self.prompt_tokens + share * self.output_tokens)
        return max(1, round(share * started * self.output_tokens))

    def _mean_s(self, share: float) -> float:
        """Return the mean predicted time of such steps."""
        num_decodes = self._num_decodes(share)
        alone_s = self._predicted_s(num_decodes, 0.0)
        full_s = self._predicted_s(num_decodes, self.budget_tokens - num_decodes)
        return alone_s + share * (full_s - alone_s)

    def _step_s(self, num_starting: float) -> float:
        """Return the predicted time of a step in which so many requests start on average."""
        tokens = max(_LEAST_TOKENS, num_starting * self.prompt_tokens)
        return self._predicted_s(max(1, round(num_starting * self.output_tokens)), tokens)

    def _predicted_s(self, num_decodes: int, prompt_tokens: float) -> float:
        """Return the predicted time of a step of mean decodes and so many tokens of prompts."""
        context = round(self.cached_tokens + self.prompt_tokens + self.output_tokens / 2)
        step = BatchShape()
        step.add_decodes([context])
        step.num_decodes, step.decode_context_tokens = num_decodes, num_decodes * context
        if prompt_tokens > 0:
            num_chunks = min(_MOST_CHUNKS, int(prompt_tokens / self.prompt_tokens) + 1)
            chunk = max(2, round(prompt_tokens / num_chunks))
            prior = max(0, round(self.cached_tokens + (self.prompt_tokens - chunk) / 2))
            for _ in range(num_chunks):
                step.add(chunk, prior)
        return self.model.predict(step)
