"""What a server adds is measured with a real client, and is what the server really adds."""

from __future__ import annotations

import time

import pytest
from factories import make_model

from slosched.core import ScheduledBatch, StepResult
from slosched.engine.emulated import EmulatedExecutor
from slosched.engine.server import ByteTokenizer
from slosched.replay.served import measured_server_time

_HIDDEN_S = 0.02


class HidesTime(EmulatedExecutor):
    """A device that takes longer than it says: the rest is the host's."""

    def execute(self, batch: ScheduledBatch) -> StepResult:
        result = super().execute(batch)
        time.sleep(_HIDDEN_S)
        return result


@pytest.mark.e2e
def test_what_a_server_adds_is_found() -> None:
    fast = make_model(0, 0, 0, 0, 0, 0, 1e-3)
    added = measured_server_time(HidesTime(fast), ByteTokenizer(), num_blocks=256, block_size=16)
    assert added.per_step_host_s >= _HIDDEN_S
    assert 0 < added.per_request_s < 10
    assert added.per_step_device_s == 0
