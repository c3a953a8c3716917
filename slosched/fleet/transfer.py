"""The copy of a prompt's KV cache from a prefill replica to a decode replica."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from slosched.core import Request


@dataclass(frozen=True)
class KVTransfer:
    """How long the keys and values of a prompt take from one replica to another.

    Each replica has one link.  It sends, or receives, one prompt after the other, in the order in
    which their prefills ended.
    """

    bytes_per_token: float
    """Keys and values of one token in all layers."""
    bytes_per_s: float = math.inf
    """Bandwidth of a replica's link."""
    latency_s: float = 0.0
    """Time that passes after the last byte was sent until the decode replica can use it."""
    num_parts: int = 1
    """Equal parts of which each is sent once it is computed: 1 to begin when the prefill has ended,
    as Splitwise does with short prompts, or the number of layers to send one layer while the next
    is computed, as Mooncake does."""

    def __post_init__(self) -> None:
        for name in ("bytes_per_token", "bytes_per_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, not {getattr(self, name)!r}")
        if not 0 <= self.latency_s < math.inf:
            raise ValueError(f"a link's latency must be seconds >= 0, not {self.latency_s!r}")
        if self.num_parts < 1:
            raise ValueError(f"a prompt is sent in at least one part, not {self.num_parts}")

    def seconds(self, num_tokens: int) -> float:
        """Return the time for which `num_tokens` tokens keep a link busy."""
        return num_tokens * self.bytes_per_token / self.bytes_per_s


class Transfer(NamedTuple):
    """One prompt's transfer."""

    request: Request
    prefill: int
    """Place of the prefill replica in its pool."""
    decode: int
    """Place of the decode replica in its pool."""
    prefill_end_s: float
    end_s: float
    """Time at which the decode replica has all of it, and the client its first token."""


class Links:
    """The links of all replicas, and until when each one is busy."""

    def __init__(self, transfer: KVTransfer) -> None:
        self._transfer = transfer
        self._sends_until_s: dict[int, float] = {}
        self._receives_until_s: dict[int, float] = {}

    def send(self, request: Request, prefill: int, decode: int, now_s: float) -> Transfer:
        """Plan the transfer of a request whose prefill has ended at `now_s`.

        Parts that were computed earlier are sent since the prefill began, as far as both links were
        free.
        """
        transfer, busy_s = self._transfer, self._transfer.seconds(request.num_prompt_tokens)
        begin_s = max(
            now_s if request.started_s is None else request.started_s,
            self._sends_until_s.get(prefill, 0.0),
            self._receives_until_s.get(decode, 0.0),
        )
        sent_s = max(begin_s + busy_s, now_s + busy_s / transfer.num_parts)
        self._sends_until_s[prefill] = self._receives_until_s[decode] = sent_s
        return Transfer(request, prefill, decode, now_s, sent_s + transfer.latency_s)
