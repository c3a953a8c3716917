"""A server whose steps emit several tokens of a request: answers, ends and counts are the same."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import aiohttp
import pytest
from live_server import live, post, stream, with_client

from slosched.scheduler import PromptLookup, Speculation


@pytest.mark.parametrize("overlap", [False, True])
def test_everybody_gets_their_own_text_and_no_token_more(overlap: bool) -> None:
    """A stop token or a stop string, which lies among accepted drafts, ends some requests."""

    async def many(client: aiohttp.ClientSession) -> list[Any]:
        asks: list[Any] = []
        for i in range(8):
            asks += [
                stream(client, prompt=f"client {i}: ", max_tokens=50),
                post(client, prompt=f"client {i}: ", max_tokens=50, stop="ent", min_tokens=12),
                post(client, prompt=f"{i}abcdefgh;", max_tokens=50, stop_token_ids=[ord(";")]),
            ]
        return list(await asyncio.gather(*asks))

    speculation = Speculation(PromptLookup(1, 3), 4)
    with live(overlap=overlap, speculation=speculation) as server:
        answers = asyncio.run(with_client(server.url, many))
        for i in range(8):
            streamed, stopped, ended = answers[3 * i : 3 * i + 3]
            text = "".join(event["choices"][0]["text"] for event in streamed)
            assert text == (f"client {i}: " * 6)[:50]
            assert stopped[1]["choices"][0]["text"] == f"client {i}: cli"
            assert stopped[1]["usage"]["completion_tokens"] == 16
            assert ended[1]["choices"][0]["text"].rstrip(";") == f"{i}abcdefgh"
            assert ended[1]["usage"]["completion_tokens"] == 10
        assert server.num_held_blocks == 0
        page = server.get("/metrics")[1]
        counts = {
            line.partition("{")[0]: float(line.rpartition(" ")[2])
            for line in page.splitlines()
            if line.startswith("vllm:")
        }
        accepted = counts["vllm:spec_decode_num_accepted_tokens_total"]
        assert 0 < accepted <= counts["vllm:spec_decode_num_draft_tokens_total"]
        name = r"vllm:spec_decode_num_accepted_tokens_per_pos_total"
        by_place = re.findall(rf'^{name}{{.*position="(\d)"}} (\d+)$', page, re.MULTILINE)
        assert [place for place, _ in by_place] == ["0", "1", "2", "3"]
        numbers = [int(number) for _, number in by_place]
        assert sum(numbers) == accepted
        assert numbers == sorted(numbers, reverse=True)
        assert counts["vllm:inter_token_latency_seconds_count"] == (
            counts["vllm:generation_tokens_total"] - 24
        )
