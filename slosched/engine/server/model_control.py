"""What an operator does between two steps: flushing the prefix cache and changing the weights.

All functions here are called in the engine's thread while no step runs.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Protocol

from slosched.core import EndReason, OperationError
from slosched.engine.loop import Engine


class ModelControl(Protocol):
    """A model whose weights can be replaced and whose steps can be profiled."""

    def read_weights(self, model_path: str) -> object:
        """Return the weights in a directory, for `install_weights`.  Any thread may call it.

        Raises OperationError if they cannot take the place of those of the model.
        """

    def install_weights(self, weights: object) -> None:
        """Replace the weights of the model."""

    def start_profile(self) -> None:
        """Begin to record what the device does; raise OperationError if that has begun."""

    def stop_profile(self) -> None:
        """End the recording; raise OperationError if none has begun."""

    def write_profile(self) -> str:
        """Write what was recorded and return the file's path.  Any thread may call it."""


class UpdateMode(StrEnum):
    """What becomes of requests in flight when the weights change, named as SGLang names it."""

    RETRACT = "retract"
    """Their KV cache is computed anew; they keep the tokens that they have emitted."""
    IN_PLACE = "in_place"
    """They go on with the KV cache of the old weights."""
    ABORT = "abort"
    """They end with an error."""


def flush(engine: Engine, *, retracts: bool) -> int:
    """Empty the prefix cache; return the number of its blocks that requests hold.

    Those stay until the requests end, unless it `retracts` them: then none is left.
    """
    scheduler = engine.scheduler
    if retracts:
        scheduler.retract_all()
    prefixes = scheduler.kv.prefixes
    prefixes.flush()
    return sum(num_holders > 0 for num_holders in prefixes.index.blocks().values())


def install(
    engine: Engine, control: ModelControl, weights: object, mode: UpdateMode, *, flushes: bool
) -> int:
    """Change the weights and return the number of requests that were in flight.

    Unless `flushes` is false, no request finds what the old weights computed.  Raises
    OperationError, and changes nothing, if that cannot be had in this mode.
    """
    scheduler = engine.scheduler
    num_in_flight = scheduler.num_unfinished
    if (
        mode is UpdateMode.IN_PLACE
        and flushes
        and scheduler.kv.caches_prefixes
        and (scheduler.num_running or scheduler.num_swapped)
    ):
        raise OperationError(
            "requests that go on in place keep blocks of the old weights in the prefix cache: send "
            "mode=retract, or flush_cache=false to let other requests find these"
        )
    if mode is UpdateMode.ABORT:
        now_s = engine.clock.now_s()
        for request in scheduler.unfinished():
            scheduler.end(request.request_id, EndReason.CLIENT, now_s)
    control.install_weights(weights)
    if mode is UpdateMode.RETRACT:
        scheduler.retract_all()
    if flushes:
        scheduler.kv.prefixes.flush()
    return num_in_flight
