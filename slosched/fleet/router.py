"""Routers: a router decides which replica serves a request, when the request arrives."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from slosched.core import Request

IntArray = npt.NDArray[np.int64]


class Replica(Protocol):
    """What a router may ask about a replica, simulated or real, as it knows it.

    Token counts and times of a real replica are estimates (`gateway/replica.py`).
    """

    @property
    def index(self) -> int:
        """Return its place in the fleet."""

    @property
    def caches_prefixes(self) -> bool:
        """Tell whether it has a prefix cache."""

    @property
    def kv_tokens(self) -> int:
        """Return the tokens that its KV cache can hold."""

    @property
    def num_requests(self) -> int:
        """Return the requests that were sent to it and have not ended."""

    @property
    def num_prompt_tokens(self) -> int:
        """Return the prompt tokens of all requests that were sent to it and have not ended."""

    @property
    def num_waiting_tokens(self) -> int:
        """Return the prompt tokens that are left to prefill."""

    def prefill_s(self, request: Request, num_cached_tokens: int = 0) -> float:
        """Return the time that the request's prefill takes alone on this device."""

    def expected_tpot_s(self) -> float:
        """Return the time for each output token to expect of a request that is sent now."""

    def expected_ttft_s(self, request: Request, num_cached_tokens: int = 0) -> float:
        """Return the time to the request's first token if it were sent now."""


R = TypeVar("R", bound=Replica)


class Router(ABC):
    """A rule that sends each request to one replica.

    A router is a dataclass whose fields are its parameters.  It reads the views that it is shown,
    and may remember what it has sent where.  It reads no clock, and draws random numbers only from
    a seed that is one of its fields.
    """

    needs_forecasts: ClassVar[bool] = False
    """Whether it asks for expected times, which only replicas that give quotes can tell."""
    uses_prefixes: ClassVar[bool] = False
    """Whether it looks at the hashes of prompts (`Request.prefix_hashes`)."""

    def places(self, num_requests: int, num_replicas: int) -> IntArray | None:  # noqa: ARG002
        """Return where each request of a new run goes, if that is known before the run.

        It is if it depends on nothing but the requests' order, and all replicas always run.  The
        result is of shape (num_requests,); None if a router looks at replicas or requests.
        """
        return None

    def reset(self) -> None:  # noqa: B027  # some routers remember nothing
        """Forget everything before a new run."""

    @abstractmethod
    def route(self, request: Request, replicas: Sequence[R]) -> R:
        """Return one of `replicas`, which are those that can serve the request, at least one.

        A view costs time only when it is asked.  So a router that asks two of a thousand replicas
        is as fast as one that asks two of four.
        """
