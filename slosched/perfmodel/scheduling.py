"""The check that a latency model is fast enough to schedule with."""

from __future__ import annotations

import timeit

from slosched.core import BatchShape, SloschedError
from slosched.perfmodel.model import FittedModel

_MAX_ADD_AND_PREDICT_US = 2
"""What every form that schedules keeps to; `make bench` holds it."""
_NUM_DECODES, _NUM_ASKED = 64, 50


class TooSlowError(SloschedError):
    """A latency model takes too long to answer for a scheduler."""


def check_can_schedule(model: FittedModel) -> None:
    """Raise TooSlowError if the model is of a form that is only for simulations and reports."""
    if not model.can_schedule:
        raise TooSlowError(
            f"this latency model cannot schedule: {too_slow(model)}. Fit another form to the same "
            "steps (`slosched fit` without --form), and keep this one for simulations"
        )


def too_slow(model: FittedModel) -> str:
    """Say how long the model takes on this machine, and what a scheduler allows."""
    return (
        f"to add a request and predict, {model.form} takes {add_and_predict_us(model):.0f} µs on "
        f"this machine, and a policy, which asks hundreds of times a step, allows "
        f"{_MAX_ADD_AND_PREDICT_US} µs"
    )


def add_and_predict_us(model: FittedModel) -> float:
    """Return the microseconds in which a policy adds a chunk to a batch and asks for its time."""
    shape = BatchShape()
    shape.add_decodes([700] * _NUM_DECODES)
    sums = shape.sums

    def ask() -> None:
        shape.add(64, 2048)
        model.predict(shape)

    repeats = timeit.repeat(ask, setup=lambda: shape.restore(sums), number=_NUM_ASKED, repeat=5)
    return 1e6 * min(repeats) / _NUM_ASKED
