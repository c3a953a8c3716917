"""The cells: what is drawn for each from a seed, and what it is played on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from experiments.arena.scenarios import Source
from experiments.random_arena.workloads import (
    KINDS,
    PROMISE_RULES,
    SIZE_FACTORS,
    WITH_PREFIXES,
    mean_tokens,
    source_of,
    with_heavy_tail,
    with_unkeepable,
)
from slosched.core import DeadlineRule, Limits, Request
from slosched.kv import PrefixCaching
from slosched.perfmodel import FittedModel, bundled_models, load_model
from slosched.policy.kit.crowd import decode_s
from slosched.policy.kit.quotes.work import prompt_work
from slosched.simulator.disturbances import Disturbances
from slosched.simulator.simulate import SimulationConfig, make_requests
from slosched.workload import Trace

T = TypeVar("T")

NUM_WINDOWS, NUM_TUNING_WINDOWS = 3, 2
WINDOW_REQUESTS = 300
"""The least requests of a window, before `Cell.usual`."""
MOST_WINDOW_REQUESTS = 1600
"""The most requests of a window, before `Cell.usual`: the shortest trace has five such windows."""
PROMISED_TIMES = 2.0
"""How often the mean time that requests may take fits into a window, at the rate for tuning."""
_MOST_WINDOWS = 20
"""The number of places in a trace at which a cell's windows may begin."""
_BLOCK_SIZE = 16
_MIN_REQUESTS_HELD = 12
"""Mean requests that a KV cache holds at least; on fewer no policy has a choice."""


@dataclass(frozen=True)
class ModelError:
    """How far the policies' latency model is from the device."""

    noise: float
    bias: float = 1.0
    online: bool = True


MODEL_ERRORS = {
    "none": ModelError(0.0, online=False),
    "noise": ModelError(0.05),
    "much noise": ModelError(0.15),
    "20 % slower": ModelError(0.05, bias=1.2, online=False),
    "20 % slower, learnt": ModelError(0.05, bias=1.2),
}
"""The kinds of error by name; steps are slower than the model says."""
_RULES = {DeadlineRule.MEAN_TPOT: 2, DeadlineRule.TBT: 1, DeadlineRule.ENVELOPE: 1}
"""The deadline rules with their weights."""
_KV_DIVISORS = (1, 2, 4, 8)
_ONE_IN = {0: 4, 100: 1, 10: 1}
"""One request in so many is promised what cannot be kept (0 for none), with weights."""


@dataclass(frozen=True)
class Cell:
    """One draw.  It is the same on every machine for the same seed and number."""

    seed: int
    number: int
    model: str
    requests: str
    first_window: int
    promise: str
    rule: str
    unkeepable_one_in: int
    """One request in so many gets a TPOT that cannot be kept; 0 for none."""
    kv_divisor: int
    heavy_tail: bool
    prefix_cache: bool
    model_error: str

    @property
    def name(self) -> str:
        return f"{self.seed}.{self.number}"

    def __str__(self) -> str:
        """Describe the cell in a line."""
        parts = [self.model, self.requests, f"{self.promise}, {self.rule}"]
        parts += [f"1 in {self.unkeepable_one_in} unkeepable"] * bool(self.unkeepable_one_in)
        parts += [f"KV ÷ {self.kv_divisor}"] * (self.kv_divisor > 1)
        parts += ["heavy tail"] * self.heavy_tail + ["prefix cache"] * self.prefix_cache
        return ", ".join([*parts, f"model error: {self.model_error}"])

    def device(self) -> FittedModel:
        return load_model(self.model)

    def config(self, device: FittedModel) -> SimulationConfig:
        error = MODEL_ERRORS[self.model_error]
        return SimulationConfig(
            limits=Limits(deadline_rule=DeadlineRule(self.rule)),
            num_blocks=kv_tokens(device) // self.kv_divisor // _BLOCK_SIZE,
            block_size=_BLOCK_SIZE,
            prefix_cache=PrefixCaching.HASH if self.prefix_cache else PrefixCaching.OFF,
            disturbances=Disturbances(noise=error.noise),
            bias=error.bias,
            online=error.online,
        )

    def source(self) -> Source:
        return source_of(self.requests)

    def usual(self, size: int = WINDOW_REQUESTS) -> int:
        """Return the requests of a window that would have `size` if none were long."""
        return round(SIZE_FACTORS.get(self.requests, 1.0) * size)

    def windows(self, device: FittedModel, size: int) -> list[Trace]:
        """Return the windows that judge, of `size` requests each."""
        return self._windows(device, size, range(NUM_WINDOWS))

    def tuning_windows(self, device: FittedModel, size: int) -> list[Trace]:
        """Return the first thirds of the next windows, on which policies are tuned."""
        places = range(NUM_WINDOWS, NUM_WINDOWS + NUM_TUNING_WINDOWS)
        return [window.head(len(window) // 3) for window in self._windows(device, size, places)]

    def _windows(self, device: FittedModel, size: int, places: Sequence[int]) -> list[Trace]:
        # Windows of one size follow one another, so that different ones share no request.
        numbers = [self.first_window + place for place in places]
        traces = self.source().windows(size, numbers)
        return [
            self._promised(trace, device, number)
            for number, trace in zip(numbers, traces, strict=True)
        ]

    def _promised(self, trace: Trace, device: FittedModel, number: int) -> Trace:
        if self.heavy_tail:
            trace = with_heavy_tail(trace, number)
        trace = trace.with_slo(PROMISE_RULES[self.promise](device, number))
        if self.unkeepable_one_in:
            trace = with_unkeepable(trace, self.unkeepable_one_in)
        return trace


def draw(seed: int, number: int) -> Cell:
    """Return a cell of a seed; it does not depend on how many others are drawn."""
    rng = np.random.default_rng([seed, number])
    requests = _one(rng, KINDS)
    divisor, model = _one(rng, _held(requests))
    return Cell(
        seed,
        number,
        model=model,
        requests=requests,
        first_window=int(rng.integers(_MOST_WINDOWS)),
        promise=_one(rng, tuple(PROMISE_RULES)),
        rule=_weighted(rng, _RULES).value,
        unkeepable_one_in=_weighted(rng, _ONE_IN),
        kv_divisor=divisor,
        heavy_tail=bool(rng.random() < 0.25),
        prefix_cache=bool(rng.random() < 0.5) and requests in WITH_PREFIXES,
        model_error=_one(rng, tuple(MODEL_ERRORS)),
    )


def num_for(trace: Trace, rate: float) -> int:
    """Return how many requests like those of `trace` a window needs at a rate.

    The window has to last for twice the mean time in which requests may be served: else all could
    come at once, wait within their promise, and still be served in time at any rate.
    """
    times_s = [r.slo.ttft_s + (r.num_output_tokens - 1) * r.slo.tpot_s for r in trace.requests]
    return round(PROMISED_TIMES * rate * float(np.mean(times_s)))


def keepable(trace: Trace, device: FittedModel, config: SimulationConfig) -> npt.NDArray[np.bool_]:
    """Mark the requests that the device could serve in time if each had it for itself."""
    requests = make_requests(trace, config.kv_tokens)
    outputs = trace.output_tokens
    alone = [_is_keepable(r, int(n), device) for r, n in zip(requests, outputs, strict=True)]
    return np.array(alone) & (trace.prompt_tokens + outputs - 1 <= config.kv_tokens)


def kv_tokens(device: FittedModel) -> int:
    """Return the tokens that the KV cache of the device holds."""
    return int(device.provenance["kv_capacity_tokens"])


def _is_keepable(request: Request, num_output_tokens: int, device: FittedModel) -> bool:
    slo = request.slo
    in_time = prompt_work(request, device).alone_s <= slo.ttft_s
    return in_time and (num_output_tokens == 1 or decode_s(request, device) <= slo.tpot_s)


@lru_cache
def _held(requests: str) -> list[tuple[int, str]]:
    """Return KV divisors with the devices that then still hold some mean requests."""
    needed = _MIN_REQUESTS_HELD * mean_tokens(requests)
    return [
        (divisor, name)
        for divisor in _KV_DIVISORS
        for name, tokens in _kv_tokens_by_model().items()
        if tokens / divisor >= needed
    ]


@lru_cache
def _kv_tokens_by_model() -> dict[str, int]:
    """Return the size of the KV cache of every bundled model on a GPU."""
    names = [name for name in bundled_models() if not name.startswith("cpu/")]
    return {name: kv_tokens(load_model(name)) for name in names}


def _one(rng: np.random.Generator, choices: Sequence[T]) -> T:
    return choices[int(rng.integers(len(choices)))]


def _weighted(rng: np.random.Generator, weights: Mapping[T, int]) -> T:
    shares = np.array(list(weights.values()), dtype=np.float64)
    return list(weights)[int(rng.choice(len(weights), p=shares / shares.sum()))]
