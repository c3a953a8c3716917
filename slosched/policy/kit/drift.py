"""The bias of a latency model, measured by a policy on the steps that it planned."""

from __future__ import annotations

import math
from dataclasses import replace

from slosched.core import BatchShape, DeadlineRule, LatencyModel, SchedulerOutput, SchedulerView
from slosched.perfmodel.online import UPPER_PER_DEVIATION, OnlineModel

_GAIN = 0.05
"""Weight of the latest step in the mean error."""
_NUM_BEFORE = 2
"""Steps without an error as which the mean begins; later it is a plain mean until `_GAIN`."""
_MOST = math.log(2.0)
"""Largest error of one step, as a logarithm: what is beyond says that it stalled."""
_LEAST = math.log(1.05)
"""Least mean error, as a logarithm, that is corrected: a model that learns has less."""
_FIRST_SPREAD = 0.04
"""Mean deviation of a step's error from the mean error, before the first step."""
_NUM_MEASURED = 32
"""Steps after which their own scatter counts, and no longer that of other steps elsewhere."""


class CorrectedModel(LatencyModel):
    """A latency model times a factor."""

    __slots__ = ("_base", "_factor", "_is_measured", "_upper_factor")

    def __init__(
        self, base: LatencyModel, factor: float, upper_factor: float, *, is_measured: bool = False
    ) -> None:
        """Multiply by `factor`; 99 % of the steps take less than `upper_factor` times `base`.

        What `base` says of this is an upper limit, too, until that factor `is_measured` well.
        """
        self._base, self._factor, self._upper_factor = base, factor, upper_factor
        self._is_measured = is_measured

    def predict(self, shape: BatchShape) -> float:
        return self._factor * self._base.predict(shape)

    def predict_upper(self, shape: BatchShape) -> float:
        base = self._base
        measured_s = self._upper_factor * base.predict(shape)
        if self._is_measured:
            return measured_s
        return max(measured_s, self._factor * base.predict_upper(shape))

    def predict_prefill(self, num_new_tokens: int, num_prior_tokens: int = 0) -> float:
        return self._factor * self._base.predict_prefill(num_new_tokens, num_prior_tokens)

    def observe(self, shape: BatchShape, seconds: float) -> None:
        self._base.observe(shape, seconds)


class Drift:
    """How much longer steps take than a latency model says that does not learn it by itself.

    The time from the planning of a step to that of the next is compared with the prediction.  Only
    steps with a part of a prompt count, so that a policy need not be asked about the others.  An
    `OnlineModel` is right in the mean, so it stays as it is.
    """

    def __init__(self) -> None:
        self._error = 0.0
        """Mean of the logarithm of measured over predicted time."""
        self._spread = _FIRST_SPREAD
        """Mean deviation of that logarithm from its mean."""
        self._num_steps = 0
        self._step: tuple[float, float] | None = None
        """The begin and the predicted seconds of the latest step, if it counts."""

    @property
    def is_measuring(self) -> bool:
        """Tell whether the time of the latest step counts, so that its end has to be seen."""
        return self._step is not None

    def corrected_view(self, view: SchedulerView, *, is_busy: bool) -> SchedulerView:
        """Learn from the latest step, which ends now if the device `is_busy`; see `seen`."""
        if self._step is not None:
            begin_s, predicted_s = self._step
            self._step = None
            if is_busy and view.now_s > begin_s and not view.follows_another:
                self._learn(math.log((view.now_s - begin_s) / predicted_s))
        return self.seen(view)

    def seen(self, view: SchedulerView) -> SchedulerView:
        """Return the view with a model that is right in the mean.

        Under the rule `tbt`, which forgives no slow step, it also knows how steps scatter.  One
        that learns from steps knows it by itself.
        """
        is_biased = abs(self._error) >= _LEAST
        is_strict = view.limits.deadline_rule is DeadlineRule.TBT
        if not is_biased and (not is_strict or isinstance(view.model, OnlineModel)):
            return view
        error = self._error if is_biased else 0.0
        upper_factor = math.exp(error + UPPER_PER_DEVIATION * self._spread)
        is_measured = is_strict and self._num_steps >= _NUM_MEASURED
        model = CorrectedModel(view.model, math.exp(error), upper_factor, is_measured=is_measured)
        return replace(view, latency_model=model)

    def note(self, now_s: float, model: LatencyModel, output: SchedulerOutput) -> None:
        """Remember a step that begins now; `model` is the one that is not corrected."""
        shape = output.shape
        if shape is not None and shape.num_prefills:
            predicted_s = model.predict(shape)
            if predicted_s > 0:
                self._step = now_s, predicted_s

    def _learn(self, error: float) -> None:
        error = min(_MOST, max(-_MOST, error))
        self._num_steps += 1
        gain = max(_GAIN, 1 / (self._num_steps + _NUM_BEFORE))
        self._error += gain * (error - self._error)
        self._spread += gain * (abs(error - self._error) - self._spread)
