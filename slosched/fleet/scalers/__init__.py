"""The table of all scalers, by name."""

from __future__ import annotations

from slosched.fleet.scaler import Scaler
from slosched.fleet.scalers.kv_use import KVUse
from slosched.fleet.scalers.predicted import Predicted
from slosched.fleet.scalers.queue_length import QueueLength

SCALERS: dict[str, type[Scaler]] = {
    "queue_length": QueueLength,
    "kv_use": KVUse,
    "predicted": Predicted,
}
