"""Caution where a deadline rule counts every gap between tokens."""

from __future__ import annotations

from dataclasses import replace

from slosched.core import BatchShape, DeadlineRule, LatencyModel, SchedulerView

_STRICTER = 3.0 / 2.33
"""Standard deviations of the limit of a step, over those of `predict_upper`: if errors are normal,
one step in 740 takes longer, not one in a hundred.  A late step costs those decodes their SLO that
can afford no late gap: about an eighth of 130 in cell 11.0 of docs/random_arena.md."""


class Cautious(LatencyModel):
    """A latency model that says of every step the time that it hardly ever exceeds."""

    __slots__ = ("_base", "_factor")

    def __init__(self, base: LatencyModel) -> None:
        self._base = base
        # The factor is the same for all steps: the times are as monotone as those of `base`.
        step = BatchShape()
        step.add(1, 1023)
        step.add(512, 0)
        expected_s, upper_s = base.predict(step), base.predict_upper(step)
        is_known = 0 < expected_s < upper_s
        self._factor = (upper_s / expected_s) ** (_STRICTER - 1) if is_known else 1.0

    def predict(self, shape: BatchShape) -> float:
        return self._factor * self._base.predict_upper(shape)

    def predict_upper(self, shape: BatchShape) -> float:
        return self._factor * self._base.predict_upper(shape)

    def predict_prefill(self, num_new_tokens: int, num_prior_tokens: int = 0) -> float:
        """Return the expected time: a prompt alone on the device makes no decode wait."""
        return self._base.predict_prefill(num_new_tokens, num_prior_tokens)

    def observe(self, shape: BatchShape, seconds: float) -> None:
        self._base.observe(shape, seconds)


def with_caution(view: SchedulerView) -> SchedulerView:
    """Return the view with a `Cautious` model under the rule `tbt`, and as it is under others.

    All questions about a step are then asked of the same model.  If the step that is planned is
    judged more cautiously than the TPOTs that it should keep, a TPOT may count as one that can be
    kept although no step that keeps it has time for a prompt.
    """
    if view.limits.deadline_rule is not DeadlineRule.TBT:
        return view
    return replace(view, latency_model=Cautious(view.model))
