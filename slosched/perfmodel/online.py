"""A latency model that follows the device: a bias that drifts, and a measured upper quantile.

A fitted model is right on average on the day it was fitted.  Then the clock throttles, another
process uses the memory bus, or the driver is updated.  A deadline also needs more than the average:
the time that a step hardly ever exceeds.  Both can be measured on the steps that run anyway.
"""

from __future__ import annotations

import math
from enum import StrEnum

from slosched.core import BatchShape, LatencyModel

MISS_RATE = 0.01
"""Share of the steps that may take longer than `predict_upper` says."""

_GAIN = 0.15
"""Gain of the bias that both regimes share; it forgets within about seven steps."""
_NUM_FIRST_STEPS = int(1 / _GAIN) - 2
"""Steps for which the shared bias is a plain average, begun with two steps of error 0."""
_OFFSET_GAIN = 0.03
"""Gain of a regime's own offset; lower, so that a drift of both is not taken for one of it alone.
"""
_CLIP = 3.0
"""Limit on one step's error in multiples of the spread, however long the step stalled."""
_SPREAD_STEP = 1.1
_SPREAD_START, _SPREAD_MIN, _SPREAD_MAX = 0.04, 0.005, 0.3
_MEDIAN_OF_NORMAL = 0.6745
"""Median size of a standard normal variable."""
_MAX_LOG_BIAS = math.log(8.0)

_MARGIN_GAIN, _FIRST_MARGIN_GAIN = 0.1, 0.5
_MARGIN_GAIN_STEPS = 100
"""Steps of a regime after which its gain is half way from the first gain to the lasting one."""
_MARGIN_START = math.log(1.25)
"""First log margin for base models without an error of their own."""
_MARGIN_MIN, _MARGIN_MAX = 0.002, math.log(4.0)
_NUM_UNTRIED_STEPS = 100
"""Steps of a regime until which its margin is at least that of errors like those so far, were they
normal: one step in a hundred has hardly been seen before."""
_NUM_PRIOR_STEPS = 4
"""Steps with the scatter of the base model's own upper bound, as which those errors begin."""
_MOST_ERROR = 0.3
"""Largest size of an error that counts there: what is beyond says that the step stalled."""
UPPER_PER_DEVIATION = 2.33 * math.sqrt(math.pi / 2)
"""What 1 % of normal errors around 0 exceed, over their mean size."""


class Regime(StrEnum):
    """The kind of kernels that a step runs; the model's error differs between kinds."""

    DECODE = "decode"
    """A step of decodes only, perhaps with copies of swapped blocks."""
    PREFILL = "prefill"
    """A step with at least one prefill chunk, with or without decodes."""


class RegimeState:
    """Estimates learnt from the steps of one regime.  Logarithms are natural."""

    __slots__ = (
        "bias",
        "log_margin",
        "margin",
        "num_over",
        "num_steps",
        "offset",
        "spread",
        "upper",
    )

    def __init__(self, log_margin: float) -> None:
        self.offset = 0.0
        """Log bias of this regime beyond the one that both share."""
        self.spread = _SPREAD_START
        """Median size of the error, as a logarithm."""
        self.log_margin = log_margin
        self.margin = math.exp(log_margin)
        """`predict_upper` over `predict`."""
        self.bias = 1.0
        """Measured over fitted time."""
        self.upper = self.margin
        """Bias times margin: 1 % of the steps exceed the base model's time times this."""
        self.num_steps = 0
        self.num_over = 0
        """Steps that took longer than `predict_upper` had said."""


class OnlineModel:
    """`base` times a bias, learnt from every step; O(1) in time and memory, deterministic.

    **Bias.**  The log ratio measured / predicted moves two things: an exponentially weighted
    average that both regimes share and, more slowly, an offset of the step's own regime.  A device
    that slows down does so for all steps, so a regime with few steps follows the other one.  An
    error counts at most three times the median error (Huber's ψ, 1964).  So a stalled step moves
    the bias as little as an unlucky one does, and a lasting change still arrives within some 20
    steps.

    **Upper quantile.**  The log margin m of a regime goes up by the factor e^(γ·0.99) after a step
    that exceeded it, and down by e^(-γ·0.01) after any other.  The log of m thus sums up γ (miss -
    0.01).  So while m stays between its bounds (0.2 % and a factor of 4), the share of misses over
    N steps is 1 % ± log(m_max / m_min) / (γ N), whatever their distribution and however it changes.
    This is the quantile tracker of Angelopoulos, Candès and Tibshirani ("Conformal PID control for
    time series prediction", NeurIPS 2023), with steps in proportion to the margin. It goes back to
    adaptive conformal inference (Gibbs and Candès, NeurIPS 2021).  The margin starts from the base
    model's own held-out upper bound, with a γ of 0.5 that soon falls to 0.1. Order statistics of a
    sliding window cover as well, but leap to a stall's length once one step in a hundred stalls.
    In the first hundred steps of a regime m is at least what 1 % of the errors would exceed if they
    were normal and of the mean size of all so far, those of the other regime included.

    **Monotone**, as the protocol `LatencyModel` demands.  The regime changes when the first chunk
    is added to a batch of decodes, so a step with a chunk is predicted to take at least as long as
    its decodes alone.
    """

    __slots__ = (
        "_common",
        "_decode",
        "_decodes",
        "_decodes_s",
        "_deviation",
        "_num_steps",
        "_prefill",
        "base",
    )

    def __init__(self, base: LatencyModel) -> None:
        if isinstance(base, OnlineModel):
            raise ValueError("the base of an OnlineModel must be a fixed model, not an OnlineModel")
        self.base = base
        step = BatchShape()
        step.add(1, 1023)
        self._decode = RegimeState(_log_margin_of(base, step))
        step.add(512, 0)
        self._prefill = RegimeState(_log_margin_of(base, step))
        self._common = 0.0
        self._num_steps = 0
        self._deviation = self._prefill.log_margin / UPPER_PER_DEVIATION
        """Mean size of the errors of the first steps."""
        self._decodes = BatchShape()
        """The latest shape of decodes that `_predict_decodes_of` predicted."""
        self._decodes_s = 0.0

    @property
    def regimes(self) -> dict[Regime, RegimeState]:
        """Return what was learnt of each regime, for reports and metrics."""
        return {Regime.DECODE: self._decode, Regime.PREFILL: self._prefill}

    @property
    def noise(self) -> float:
        """Return the sigma of a lognormal factor that spreads as steps do around the prediction.

        It is that of the regime that has had more steps.
        """
        states = self.regimes.values()
        return max(states, key=lambda state: state.num_steps).spread / _MEDIAN_OF_NORMAL

    @property
    def coverage(self) -> float | None:
        """Share of the steps so far that stayed within `predict_upper`; None before the first."""
        states = self.regimes.values()
        num_steps = sum(state.num_steps for state in states)
        return 1 - sum(state.num_over for state in states) / num_steps if num_steps else None

    def predict(self, shape: BatchShape) -> float:
        seconds = self.base.predict(shape)
        if not shape.num_prefills:
            return seconds * self._decode.bias
        factor, least = self._prefill.bias, self._decode.bias
        if factor >= least:
            return seconds * factor
        return max(seconds * factor, self._predict_decodes_of(shape) * least)

    def predict_upper(self, shape: BatchShape) -> float:
        seconds = self.base.predict(shape)
        if not shape.num_prefills:
            return seconds * self._decode.upper
        factor, least = self._prefill.upper, self._decode.upper
        if factor >= least:
            return seconds * factor
        return max(seconds * factor, self._predict_decodes_of(shape) * least)

    def predict_prefill(self, num_new_tokens: int, num_prior_tokens: int = 0) -> float:
        # A chunk of one token is a decode; see BatchShape.
        state = self._prefill if num_new_tokens > 1 else self._decode
        return self.base.predict_prefill(num_new_tokens, num_prior_tokens) * state.bias

    def observe(self, shape: BatchShape, seconds: float) -> None:
        """Learn from a step; ignore it if its time or its prediction is not positive."""
        predicted_s = self.base.predict(shape)
        if not (seconds > 0 and predicted_s > 0):
            return
        state = self._prefill if shape.num_prefills else self._decode
        error = math.log(seconds / predicted_s) - self._common - state.offset
        self._learn_margin(state, error)
        self._learn_bias(state, error)
        self._learn_deviation(error)
        for each in (self._decode, self._prefill):
            each.bias = math.exp(self._common + each.offset)
            each.upper = each.bias * self._margin_of(each)

    def _learn_margin(self, state: RegimeState, error: float) -> None:
        state.num_steps += 1
        extra = _FIRST_MARGIN_GAIN - _MARGIN_GAIN
        gain = _MARGIN_GAIN + extra / (1 + state.num_steps / _MARGIN_GAIN_STEPS)
        if error > state.log_margin:
            state.num_over += 1
            grown = state.log_margin * math.exp(gain * (1 - MISS_RATE))
            state.log_margin = min(_MARGIN_MAX, grown)
        else:
            shrunk = state.log_margin * math.exp(-gain * MISS_RATE)
            state.log_margin = max(_MARGIN_MIN, shrunk)
        state.margin = math.exp(state.log_margin)

    def _learn_bias(self, state: RegimeState, error: float) -> None:
        self._num_steps += 1
        gain = _GAIN if self._num_steps > _NUM_FIRST_STEPS else 1 / (self._num_steps + 2)
        spread, most = state.spread, _CLIP * state.spread
        # Equal factors up and down keep as many errors above the spread as below: the median.
        if -spread < error < spread:
            state.spread = max(_SPREAD_MIN, spread / _SPREAD_STEP)
        else:
            state.spread = min(_SPREAD_MAX, spread * _SPREAD_STEP)
            error = max(-most, min(most, error))
        self._common = _clamp(self._common + gain * error)
        state.offset = _clamp(state.offset + _OFFSET_GAIN * error)

    def _margin_of(self, state: RegimeState) -> float:
        """Return the margin of a regime, raised to what all errors so far say if it is untried."""
        if state.num_steps >= _NUM_UNTRIED_STEPS:
            return state.margin
        return max(state.margin, math.exp(UPPER_PER_DEVIATION * self._deviation))

    def _learn_deviation(self, error: float) -> None:
        if self._num_steps <= 2 * _NUM_UNTRIED_STEPS:
            size = min(_MOST_ERROR, abs(error))
            self._deviation += (size - self._deviation) / (self._num_steps + _NUM_PRIOR_STEPS)

    def _predict_decodes_of(self, shape: BatchShape) -> float:
        """Return what the base model predicts for the step without its chunks.

        The result is kept: a step is packed with decodes first, then asked about one chunk at a
        time.
        """
        decodes = self._decodes
        if (
            decodes.decode_context_tokens != shape.decode_context_tokens
            or decodes.num_decodes != shape.num_decodes
            or decodes.max_context_tokens != shape.max_decode_context_tokens
            or decodes.num_draft_tokens != shape.num_draft_tokens
            or decodes.num_swapped_blocks != shape.num_swapped_blocks
        ):
            decodes.num_decodes = shape.num_decodes
            decodes.decode_context_tokens = shape.decode_context_tokens
            decodes.max_context_tokens = shape.max_decode_context_tokens
            decodes.max_decode_context_tokens = shape.max_decode_context_tokens
            decodes.num_draft_tokens = shape.num_draft_tokens
            decodes.num_swapped_blocks = shape.num_swapped_blocks
            self._decodes_s = self.base.predict(decodes)
        return self._decodes_s


def _log_margin_of(base: LatencyModel, shape: BatchShape) -> float:
    """Return the log margin of the base model's own upper bound, or a default if it has none."""
    expected_s, upper_s = base.predict(shape), base.predict_upper(shape)
    if not 0 < expected_s < upper_s < math.inf:
        return _MARGIN_START
    return max(_MARGIN_MIN, min(_MARGIN_MAX, math.log(upper_s / expected_s)))


def _clamp(log_bias: float) -> float:
    if -_MAX_LOG_BIAS <= log_bias <= _MAX_LOG_BIAS:
        return log_bias
    return math.copysign(_MAX_LOG_BIAS, log_bias)
