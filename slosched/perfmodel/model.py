"""The base class of the fitted latency models of all forms."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from slosched.core import BatchShape
from slosched.perfmodel.server_time import NO_SERVER_TIME, ServerTime


@dataclass(eq=False, kw_only=True)
class FittedModel(ABC):
    """A latency model that was fitted to measurements and does not change.

    Each form has its own `predict`; all other predictions are derived from it.
    """

    can_schedule: ClassVar[bool] = True
    """False if a prediction takes so long that it is only for simulations and reports."""

    provenance: Mapping[str, str] = field(default_factory=dict)
    held_out_error: Mapping[str, float] = field(default_factory=dict)
    """`count` held-out steps, and the errors on them in percent: `mape`, `p99` and `under_p99`."""
    server_time: ServerTime = NO_SERVER_TIME
    """What the server around the device adds; predictions leave it out."""
    noise: float = 0.0
    """How single steps scatter about the predictions: sigma of log(measured / predicted); 0 if that
    is not known."""

    def __post_init__(self) -> None:
        self._prompt_s: dict[int, float] = {}
        under = self.held_out_error.get("under_p99", 0.0) / 100
        # Under-prediction is relative to the measured time: measured = predicted / (1 - under).
        self._upper = 1 / (1 - min(under, 0.9))

    def __getstate__(self) -> dict[str, object]:
        """Return what a copy in another process needs; the remembered times are computed anew."""
        return {**self.__dict__, "_prompt_s": {}}

    @property
    @abstractmethod
    def form(self) -> str:
        """Return the name by which the form is chosen and stored."""

    @property
    def swapped_block_s(self) -> float:
        """Return the seconds of copying one KV block between device and host; 0 if that is free."""
        return 0.0

    @abstractmethod
    def predict(self, shape: BatchShape) -> float:
        """Return the seconds of one step of this shape, 0 for an empty one, in O(1)."""

    @abstractmethod
    def parameters(self) -> dict[str, Any]:
        """Return what a file keeps of the model, ready for JSON; names of times end with `_s`."""

    def description(self) -> dict[str, Any]:
        """Return all that is known besides the parameters, by the names of the fields."""
        return {
            "provenance": self.provenance,
            "held_out_error": self.held_out_error,
            "server_time": self.server_time,
            "noise": self.noise,
        }

    def predict_upper(self, shape: BatchShape) -> float:
        """Return the prediction, raised so far that 99 % of the held-out steps took less."""
        return self._upper * self.predict(shape)

    def decode_ends(
        self, shape: BatchShape, start_s: float, most: int, until_s: float, factor: float = 1.0
    ) -> list[float]:
        """Return when steps of the same decodes and nothing else end that follow each other.

        `shape` is that of the first step, which begins at `start_s`; each step makes every context
        longer by a token.  Each takes `factor` times what `predict` says, to the bit.  The list has
        `most` times, or as many as it takes to reach `until_s`, and at least one.
        """
        shape, end_s, ends_s = shape.copy(), start_s, []
        for _ in range(most):
            end_s += self.predict(shape) * factor
            ends_s.append(end_s)
            if end_s >= until_s:
                break
            shape.lengthen_contexts()
        return ends_s

    def predict_prefill(self, num_new_tokens: int, num_prior_tokens: int = 0) -> float:
        if num_prior_tokens:
            return self._predict_alone(num_new_tokens, num_prior_tokens)
        seconds = self._prompt_s.get(num_new_tokens)
        if seconds is None:
            seconds = self._prompt_s[num_new_tokens] = self._predict_alone(num_new_tokens, 0)
        return seconds

    def _predict_alone(self, num_new_tokens: int, num_prior_tokens: int) -> float:
        shape = BatchShape()
        shape.add(num_new_tokens, num_prior_tokens)
        return self.predict(shape)

    def observe(self, shape: BatchShape, seconds: float) -> None:  # noqa: B027  # not abstract
        """Do nothing: a fitted model does not change; an `OnlineModel` around it learns."""
