"""A latency model as it is at one moment, for those who look ahead while the model goes on."""

from __future__ import annotations

from copy import copy

from slosched.core import BatchShape, LatencyModel
from slosched.perfmodel.online import OnlineModel


class FrozenModel(OnlineModel):
    """An online model that has stopped to learn; what the original learns later is not in it."""

    __slots__ = ()

    def __init__(self, model: OnlineModel) -> None:
        super().__init__(model.base)
        self._decode, self._prefill = copy(model._decode), copy(model._prefill)

    def observe(self, shape: BatchShape, seconds: float) -> None:
        """Do nothing."""


def frozen(model: LatencyModel) -> LatencyModel:
    """Return the model as it is now; a model that never learns is returned itself."""
    return FrozenModel(model) if isinstance(model, OnlineModel) else model
