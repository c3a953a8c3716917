"""`radix` with a tier in host memory, compared with decisions of SGLang 0.5.5's HiRadixCache.

The replay here does two things as SGLang does: when the device is full, it evicts as many blocks as
are requested, not as many as are missing, and it loads no prefix of fewer than 10 tokens (or the
number in the recording).  Then all decisions agree as long as the host has room.  When the host is
full, SGLang drops whole nodes, least recently used first, as many as are requested.  slosched drops
the blocks that left the device first, and only as many as are missing.
"""

from __future__ import annotations

import gzip
import json
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from slosched.core import EndReason, Request, ScheduledChunk
from slosched.kv import HostWrites, Key, KVCache, PrefixHost, RadixIndex, block_keys
from slosched.kv.prefix.cache import TieredPrefixCache
from slosched.kv.prefix.host_tier import HostTier
from slosched.kv.prefix.sharing import SharedBlocks

RECORDED = Path(__file__).parents[1] / "oracles" / "sglang055_hicache.jsonl.gz"
WRITES = {"write_back": HostWrites.BACK, "write_through": HostWrites.THROUGH}
"""The modes with an equal in slosched.

`write_through_selective` has none: it writes blocks after two hits, one of which is the request's
own end.
"""


class EvictingPrefixes(TieredPrefixCache):
    """A prefix cache that, when there is too little room, evicts all that is requested, as SGLang."""

    def take(self, count: int) -> list[int]:
        if self._pool.num_free < count:
            self._pool.give_back(self._blocks.evict(count))
        return self._pool.take(count)


class Replay:
    """A replay of one recorded workload."""

    def __init__(self, workload: dict[str, Any]) -> None:
        config = workload["config"]
        self.steps: list[dict[str, Any]] = workload["steps"]
        self.page: int = config["page"]
        self.least_load: int = config["least_load"]
        num_host = int(config["kv"] * config["host_ratio"]) // self.page
        host = PrefixHost(num_host, WRITES.get(config["writes"], HostWrites.THROUGH))
        self.index = RadixIndex()
        self.kv = KVCache(config["kv"] // self.page, self.page)
        self.tier = HostTier(host, self.index)
        blocks = SharedBlocks(self.index, self.page, self.tier)
        self.kv.prefixes = self.prefixes = EvictingPrefixes(
            blocks, self.kv._device, self.kv._tables, self.tier, first_host_block=0
        )
        self.requests = [
            Request(str(place), 0.0, len(tokens), 1, prompt_token_ids=tuple(tokens))
            for place, tokens in enumerate(workload["prompts"])
        ]
        self.keys = [block_keys(r, self.page).first(r.num_tokens) for r in self.requests]
        self.known = {key for keys in self.keys for key in keys}
        self.num_computed: dict[int, int] = {}
        self.seen: Counter[str] = Counter()

    def run(self) -> Counter[str]:
        for step in self.steps:
            if "end" in step:
                self.end(step["end"])
            else:
                if step["run"] not in self.num_computed:
                    self.start(step)
                self.compute(step["run"], step["computed"])
            self.compare(step)
        self.kv.check()
        return self.seen

    def start(self, step: dict[str, Any]) -> None:
        place = step["run"]
        request = self.requests[place]
        request.end_reason = None
        self.kv.prefixes.watch(request)
        [(name, num_found)] = self.kv.prefixes.refresh()
        num_on_device = self.num_on_device(self.keys[place][: num_found // self.page])
        num_on_host = num_found - num_on_device
        self.seen["starts"] += 1
        self.seen["found as SGLang"] += [num_on_device, num_on_host] == step["found"]
        self.seen["found"] += num_found
        self.seen["found by SGLang"] += sum(step["found"])
        if num_on_host < self.least_load:
            first, stop = num_on_device // self.page, num_found // self.page
            self.tier.pin(name, self.keys[place][first:stop])  # which SGLang has looked at
            self.tier.unpin(name)
            self.kv.prefixes.start(name, num_on_device)
            self.num_computed[place] = num_on_device
        else:
            self.kv.prefixes.start(name)
            self.prefixes.load_started()
            self.num_computed[place] = num_found
            self.seen["loaded"] += num_on_host

    def compute(self, place: int, stop: int) -> None:
        request, prior = self.requests[place], self.num_computed[place]
        table = self.kv.grow(request.request_id, stop)
        self.kv.prefixes.take_copies()
        self.kv.prefixes.note_computed([ScheduledChunk(request, stop - prior, prior, False, table)])
        self.num_computed[place] = stop

    def end(self, place: int) -> None:
        del self.num_computed[place]
        self.requests[place].end_reason = EndReason.CLIENT
        self.kv.forget(self.requests[place].request_id)
        self.kv.prefixes.settle_ends()

    def compare(self, step: dict[str, Any]) -> None:
        on_device = [self.num_on_device(keys) for keys in self.keys]
        anywhere = [self.num_anywhere(keys) for keys in self.keys]
        self.seen["steps"] += 1
        self.seen["same on the device"] += on_device == [tokens for tokens, _ in step["where"]]
        self.seen["same anywhere"] += anywhere == [tokens for _, tokens in step["where"]]
        self.seen["same evictable"] += self.index.num_evictable * self.page == step["evictable"]
        if "run" in step and step["computed"] < self.requests[step["run"]].num_prompt_tokens:
            return  # SGLang writes through when all of a prompt is computed
        num_written = sum(key in self.tier for key in self.known)
        self.seen["settled"] += 1
        self.seen["same on the host"] += num_written * self.page == step["host"]

    def num_on_device(self, keys: Sequence[Key]) -> int:
        return bisect_left(keys, True, key=lambda key: key not in self.index) * self.page

    def num_anywhere(self, keys: Sequence[Key]) -> int:
        """Return how many tokens of these keys are cached on the device or on the host."""

        def is_lost(key: Key) -> bool:
            return key not in self.index and key not in self.tier

        return bisect_left(keys, True, key=is_lost) * self.page


@pytest.fixture(scope="module")
def seen() -> dict[tuple[float, str], Counter[str]]:
    """Return the counts by ratio of host to device size and by SGLang's mode of writing."""
    seen: dict[tuple[float, str], Counter[str]] = {}
    with gzip.open(RECORDED, "rt") as file:
        for workload in map(json.loads, file):
            config = workload["config"]
            kind = config["host_ratio"], config["writes"]
            seen.setdefault(kind, Counter()).update(Replay(workload).run())
    return seen


@pytest.mark.parametrize("writes", ["write_back", "write_through", "write_through_selective"])
def test_all_agrees_while_the_host_has_room(
    seen: dict[tuple[float, str], Counter[str]], writes: str
) -> None:
    large = seen[8.0, writes]
    assert large["steps"] == large["same on the device"] == large["same evictable"] == 360
    assert large["same anywhere"] == 360
    assert large["found as SGLang"] == large["starts"] > 160
    assert large["loaded"] > 300
    if writes in WRITES:
        assert large["same on the host"] == large["settled"] > 300


def test_where_the_host_is_full_about_as_much_is_found(
    seen: dict[tuple[float, str], Counter[str]],
) -> None:
    """SGLang drops more than it has to, so it finds a little less."""
    small = sum((counts for (ratio, _), counts in seen.items() if ratio < 8), Counter[str]())
    assert (small["starts"], small["found as SGLang"]) == (1010, 985)
    assert (small["found"], small["found by SGLang"]) == (11441, 11268)
    assert (small["steps"], small["same on the device"]) == (2160, 2094)
