"""A server whose prefix cache evicts in another order than LRU."""

from __future__ import annotations

import pytest

from slosched.kv import Eviction, PrefixCaching
from tests.live_server import live


@pytest.mark.parametrize("eviction", [Eviction.TTL, Eviction.TAIL_LRU, Eviction.SAVED_TIME])
def test_a_short_cache_serves_every_turn_and_finds_the_last_one_again(eviction: Eviction) -> None:
    """Clients send no session id: a turn is known by the prompt that it repeats."""
    with live(prefix_cache=PrefixCaching.HASH, eviction=eviction, num_blocks=60) as server:
        for turn in range(8):
            for session in "abc":
                prompt = f"{session} said " * (1 + turn)
                status, answer, *_ = server.post(prompt=prompt, max_tokens=4)
                assert status == 200
                assert len(answer["choices"][0]["text"]) == 4
            server.post(prompt=f"{turn} is asked but once " * 5, max_tokens=4)
        server.post(prompt="the end of it all", max_tokens=4)
        server.post(prompt="the end of it all", max_tokens=4)
        assert server.worker.records[-1].num_cached_tokens == 16
        assert server.num_held_blocks == 0
        server.worker.scheduler.kv.check()
