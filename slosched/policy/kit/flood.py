"""Who gets KV blocks while prompts want more of them than decodes leave."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slosched.core import Request, SchedulerView
from slosched.policy.kit.arrivals import Arrivals
from slosched.policy.kit.memory import are_few, has_time_for_freed, lacks_blocks, will_be_filled
from slosched.policy.kit.pace import Pace
from slosched.policy.kit.pausing import in_turn_for_blocks, is_flooded, tokens_per_s_beside
from slosched.policy.kit.prompt_pack import PromptPack
from slosched.policy.kit.punctual import Order, Timed

_MOST_PAUSED = 0.5
"""Share of the cache that paused requests would fill, up to which long prompts may start."""


@dataclass
class Flood:
    """Tells whether KV blocks are short, and in what order prompts then get them."""

    arrivals: Arrivals
    """They tell how many prompt tokens arrive in a second, and how many tokens requests emit."""
    min_share: float
    """Least share of the device that prompts have."""

    def is_short_of_blocks(
        self, pace: Pace, prompts: Sequence[Timed], pack: PromptPack, view: SchedulerView
    ) -> bool:
        """Tell whether prompts lack KV blocks, and few are free or many more will be wanted.

        Where promises differ, prompts that the device has no time for do not count: they will want
        none.  Where nearly all arrivals ask for the same TPOT they do count.  The prompts then go
        by length earlier, and that is where it was seen to serve more of them.
        """
        num_free = pack.num_free_blocks
        if not lacks_blocks(prompts, num_free, view):
            return False
        if are_few(num_free, view):
            return True
        arriving = self.arrivals.tokens_per_s(view.now_s)
        if not self.arrivals.are_promises_alike:
            arriving = min(arriving, tokens_per_s_beside(pace, view, self.min_share))
        return self._is_rising(arriving, pace, view)

    def has_time_for_freed(self, pace: Pace, limit_s: float, view: SchedulerView) -> bool:
        """Tell whether a step as long as `limit_s` has time for the prompts that find blocks."""
        stay_tokens = self.arrivals.stays.mean_tokens(view.now_s)
        return has_time_for_freed(pace, limit_s, stay_tokens, view)

    def in_turn(
        self,
        order: Order,
        prompts: Sequence[Timed],
        pace: Pace,
        view: SchedulerView,
        fairness: float,
    ) -> list[Request]:
        """Return the prompts in the order in which they get blocks that are too few for all."""
        if self._is_rising(self.arrivals.tokens_per_s(view.now_s), pace, view):
            return in_turn_for_blocks(order, prompts, pace, view, fairness)
        return [*order.in_time, *order.late]

    def may_long_start(self, pace: Pace, view: SchedulerView) -> bool:
        """Tell whether long prompts may take blocks that are short.

        They may as long as the requests that were paused for prompts would fill at most half of the
        cache.  While they would fill more, there is hardly time to compute them anew.
        """
        kv, tokens_per_s = view.kv, self.arrivals.tokens_per_s(view.now_s)
        if not will_be_filled(0, kv) or not self._is_rising(tokens_per_s, pace, view):
            return False
        paused = [r.num_tokens for r in (*view.waiting, *view.swapped) if r.num_output_tokens]
        return sum(paused) <= _MOST_PAUSED * kv.num_blocks * kv.block_size

    def _is_rising(self, tokens_per_s: float, pace: Pace, view: SchedulerView) -> bool:
        """Tell whether so many tokens of prompts are more than decodes make room for."""
        return is_flooded(tokens_per_s, self.arrivals.stays.mean_tokens(view.now_s), pace, view)
