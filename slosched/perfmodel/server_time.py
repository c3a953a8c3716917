"""What a real server adds to the times that a latency model of its device predicts."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

SERVER_TIME_ORIGIN = "server_time_origin"
"""The provenance's key for how the server's times were measured; models without them lack it."""


@dataclass(frozen=True, slots=True)
class ServerTime:
    """The times that a server adds to its device; none by default."""

    per_request_s: float = 0.0
    """How much later a client sees its tokens than the engine's clock says, once per request: HTTP,
    tokenizing, detokenizing.  TTFT and E2E are longer by it, TPOT is not.  Only the sum of what
    comes before and after the engine matters: a constant delay before it shifts all arrivals
    alike."""
    per_step_device_s: float = 0.0
    """Time between two steps that planning ahead cannot hide: launch gaps, copies of inputs,
    sampling."""
    per_step_host_s: float = 0.0
    """The host's time for a step: scheduling, preparing inputs, processing outputs.  An engine that
    plans ahead hides it behind the running step."""

    def __post_init__(self) -> None:
        for name, seconds in asdict(self).items():
            if not 0 <= seconds < math.inf:
                raise ValueError(f"{name} must be finite seconds >= 0, not {seconds!r}")

    @property
    def is_none(self) -> bool:
        """Tell whether the server adds nothing."""
        return not (self.per_request_s or self.per_step_device_s or self.per_step_host_s)

    def per_step_s(self, *, overlap: bool) -> float:
        """Return what each step takes longer, with or without planning ahead."""
        return self.per_step_device_s + (0.0 if overlap else self.per_step_host_s)

    def __str__(self) -> str:
        """Describe the times that there are: "9 ms a request, 0.3 ms a step on the device"."""
        kinds = (
            (self.per_request_s, "a request"),
            (self.per_step_device_s, "a step on the device"),
            (self.per_step_host_s, "a step on the host"),
        )
        return ", ".join(f"{1e3 * s:.3g} ms {kind}" for s, kind in kinds if s) or "nothing"


NO_SERVER_TIME = ServerTime()
