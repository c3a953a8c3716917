"""`slosched serve --emulate` with a device that fails now and then, as devices do."""

from __future__ import annotations

import random
import sys

from slosched.cli import main
from slosched.cli.commands import serve
from slosched.core import ScheduledBatch, StepResult
from slosched.engine.emulated import EmulatedExecutor

FAULT = "the soak let this step fail"
_SHARE = 1 / 400
"""The share of the steps that fail."""


class FaultyExecutor(EmulatedExecutor):
    _rng = random.Random(1)

    def execute(self, batch: ScheduledBatch) -> StepResult:
        if self._rng.random() < _SHARE:
            raise RuntimeError(FAULT)
        return super().execute(batch)


if __name__ == "__main__":
    serve.EmulatedExecutor = FaultyExecutor  # type: ignore[misc]
    sys.exit(main())
