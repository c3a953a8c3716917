"""The settings that the operator of a gateway chooses."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """How a gateway treats its clients and its replicas."""

    api_key: str | None = None
    """The key with which the gateway itself asks replicas; clients send their own."""
    poll_interval_s: float = 0.1
    """How often a replica is asked for its state."""
    connect_timeout_s: float = 3.0
    """How long a connection to a replica may take before the request goes elsewhere."""
    poll_timeout_s: float = 5.0
    """How long a replica may take to tell its state before it counts as down."""
    request_timeout_s: float | None = None
    """How long a request may take until the end of its answer; None for no limit."""
    body_timeout_s: float = 60.0
    """How long a client may take to send a request's body."""
    retry_after_s: float = 1.0
    """Seconds in the `Retry-After` header of a 503."""
    max_requests: int | None = None
    """How many requests for generations are answered at once; None for no limit."""
    allowed_origins: tuple[str, ...] = ()
    """The origins of web pages that may use the gateway; "*" for all."""
    root_path: str = ""
    """The path before all endpoints at which a proxy offers the gateway, such as "/llm"."""

    def __post_init__(self) -> None:
        for name in ("poll_interval_s", "connect_timeout_s", "poll_timeout_s"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be positive seconds, not {getattr(self, name)!r}")
