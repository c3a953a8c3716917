"""A latency model as it is at one moment, for those who look ahead while the model goes on."""

from __future__ import annotations

from copy import copy
from typing import TypeGuard

from slosched.core import BatchShape, LatencyModel
from slosched.perfmodel.model import FittedModel
from slosched.perfmodel.online import OnlineModel


class FrozenModel(OnlineModel):
    """An online model that has stopped to learn; what the original learns later is not in it."""

    __slots__ = ()

    def __init__(self, model: OnlineModel) -> None:
        super().__init__(model.base)
        self._decode, self._prefill = copy(model._decode), copy(model._prefill)

    def observe(self, shape: BatchShape, seconds: float) -> None:
        """Do nothing."""

    def decode_ends(
        self, shape: BatchShape, start_s: float, most: int, until_s: float
    ) -> list[float]:
        """Return when steps of the same decodes end, as `FittedModel.decode_ends` does."""
        base, bias = self.base, self._decode.bias
        assert isinstance(base, FittedModel), f"{type(base).__name__} may learn"
        return base.decode_ends(shape, start_s, most, until_s, bias)


def is_unchanging(model: LatencyModel) -> TypeGuard[FittedModel | FrozenModel]:
    """Tell whether the model never learns, so that the times of steps to come are known."""
    if isinstance(model, FrozenModel):
        return isinstance(model.base, FittedModel)
    return isinstance(model, FittedModel)


def frozen(model: LatencyModel) -> LatencyModel:
    """Return the model as it is now; a model that never learns is returned itself."""
    return FrozenModel(model) if isinstance(model, OnlineModel) else model
