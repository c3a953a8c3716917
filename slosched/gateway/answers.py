"""What a router takes for the answer of a replica: no redirect, and no more than a limit."""

from __future__ import annotations

import aiohttp

REDIRECTS = range(300, 400)
"""Statuses that no server for text has a reason to answer with.  Who followed them would leave the
fleet, and send a prompt and maybe a key to whatever the replica names."""
MOST_ANSWER_BYTES = 2**28
"""The size of the largest answer that is held until it is whole, and of the largest event of a
stream: far more than that of 100,000 tokens with the log-probabilities of 20 others each."""
MOST_STATE_BYTES = 2**24
"""The size of the largest page about a replica's state; pages of metrics are the longest, of some
hundred thousand bytes."""


class TooLongError(aiohttp.ClientPayloadError):
    """A replica sends more than it may; the text says so."""

    def __init__(self, most: int) -> None:
        super().__init__(f"it sends more than {most} bytes")


async def read_whole(response: aiohttp.ClientResponse, most: int) -> bytes:
    """Return the body of an answer; raise TooLongError as soon as it has more than `most` bytes."""
    if (response.content_length or 0) > most:
        raise TooLongError(most)
    pieces, num_bytes = [], 0
    async for piece in response.content.iter_any():
        pieces.append(piece)
        num_bytes += len(piece)
        if num_bytes > most:
            raise TooLongError(most)
    return b"".join(pieces)
