"""The settings that the operator of a server chooses."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from slosched.core import NO_SLO, SLO, OnInfeasible
from slosched.workload.service_tier import ServiceTier


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """The HTTP side of a server; the engine has its own settings (`Limits`, `KVCache`)."""

    model_name: str
    """The model's id in /v1/models.  Requests for any other model get a 404."""
    max_model_len: int
    """The limit for prompt and output tokens together; the KV cache may hold fewer."""
    default_slo: SLO = NO_SLO
    """The SLO of requests that bring none of their own."""
    tiers: Mapping[str, ServiceTier] = field(default_factory=dict)
    """The tiers that requests may name."""
    on_infeasible: OnInfeasible = OnInfeasible.REJECT
    """What becomes of a request whose SLO cannot be kept, if neither it nor its tier says."""
    default_temperature: float = 1.0
    """The temperature of requests that set none; 1 is OpenAI's default, 0 is greedy."""
    retry_after_s: float = 1.0
    """Seconds in the `Retry-After` header of a 429 or 503."""
    per_request_s: float = 0.0
    """How much later a client sees its first token than the engine has it.  A request counts as
    sent so much before it was received, so that its deadlines are those of its client."""
    body_timeout_s: float = 60.0
    """How long a client may take to send a request's body."""
    request_timeout_s: float | None = None
    """How long a request may take until its last token; None for no limit."""
    max_requests: int | None = None
    """How many requests for generations are answered at once; None for no limit."""
    allowed_origins: tuple[str, ...] = ()
    """The origins of web pages that may use the server; "*" for all."""
    root_path: str = ""
    """The path before all endpoints at which a proxy offers the server, such as "/llm"."""
    api_keys: tuple[str, ...] = ()
    """The keys of which a request must have one; without any, everybody is served."""
    admin_api_key: str | None = None
    """The key of the operator's endpoints; without it there are none."""
    changes_adapters: bool = False
    """Whether clients may load and unload LoRA adapters, from any directory of this machine."""
    tenants: Mapping[str, str] = field(default_factory=dict)
    """The names of tenants by their API keys, which are served as `api_keys` are."""
    logs_requests: bool = False
    """Whether a line is logged for each request for text when it has ended."""
    provenance: Mapping[str, str] = field(default_factory=dict)
    """Device, engine, policy and limits, which a recorder of the steps writes down with them."""

    def __post_init__(self) -> None:
        if not self.model_name:
            raise ValueError("model_name must not be empty")
        if self.max_model_len < 2:
            raise ValueError(
                f"max_model_len must hold a prompt and an output token, not {self.max_model_len}"
            )
        if not all((*self.api_keys, *self.tenants)) or self.admin_api_key == "":
            raise ValueError("an API key must not be empty")
        if not self.default_temperature >= 0:
            raise ValueError(f"default_temperature must be >= 0, not {self.default_temperature!r}")
        if not 0 <= self.per_request_s < math.inf:
            raise ValueError(
                f"per_request_s must be finite seconds >= 0, not {self.per_request_s!r}"
            )
        if self.request_timeout_s is not None and not self.request_timeout_s > 0:
            raise ValueError(f"request_timeout_s must be positive, not {self.request_timeout_s!r}")
        if self.max_requests is not None and self.max_requests < 1:
            raise ValueError(f"max_requests must be at least 1, not {self.max_requests}")
        if self.root_path and (self.root_path[0] != "/" or self.root_path[-1] == "/"):
            raise ValueError(
                f"root_path begins with a slash and ends without one, as in /llm, "
                f"not {self.root_path!r}"
            )
        if not self.retry_after_s > 0:
            raise ValueError(f"retry_after_s must be positive, not {self.retry_after_s!r}")
