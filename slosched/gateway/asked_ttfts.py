"""The TTFTs that requests lately asked for, so that replicas are asked for quotes of each."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

_MOST = 3
"""TTFTs that are remembered: with the default one, so many questions are asked in each poll."""
_FORGOTTEN_AFTER_S = 10.0


class AskedTTFTs:
    """Remembers the latest TTFTs, a few of them, each until nobody has asked for it for 10 s."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._asked_s: dict[float, float] = {}
        """When each was last asked for, the latest last."""

    def note(self, ttft_s: float) -> None:
        """Remember a TTFT; one without a limit can only be the default one."""
        if ttft_s == math.inf:
            return
        self._asked_s.pop(ttft_s, None)
        self._asked_s[ttft_s] = self._now_s()
        if len(self._asked_s) > _MOST:
            del self._asked_s[next(iter(self._asked_s))]

    def other_than(self, default_s: float) -> list[float]:
        """Return those that are remembered, without the one that is promised by default."""
        since_s = self._now_s() - _FORGOTTEN_AFTER_S
        self._asked_s = {ttft_s: at_s for ttft_s, at_s in self._asked_s.items() if at_s >= since_s}
        return [ttft_s for ttft_s in self._asked_s if ttft_s != default_s]
