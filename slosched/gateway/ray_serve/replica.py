"""The deployment whose replicas run a server each."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence

import aiohttp
import ray

from slosched.gateway.errors import replica_failed
from slosched.gateway.headers import SKIPPED, answered
from slosched.gateway.questions import describe
from slosched.gateway.ray_serve.call import Call, Head
from slosched.gateway.ray_serve.server_process import ServerProcess

URL = "url"
"""The key of the server's address in a replica's metadata."""


class EngineReplica:
    """Runs a server, and answers calls with what it answers.

    A client that goes away ends the call, which closes the connection to the server, so that the
    server aborts the request.
    """

    def __init__(
        self, arguments: Sequence[str], environment: Mapping[str, str], drain_timeout_s: float
    ) -> None:
        """Start `slosched serve` with these arguments and variables; return when it is ready.

        The server drains for `drain_timeout_s` when it is stopped.
        """
        self._drain_timeout_s = drain_timeout_s
        self._is_stopping = False
        self._server = ServerProcess(arguments, ray.util.get_node_ip_address(), environment)
        self._session: aiohttp.ClientSession | None = None
        self._server.wait_until_ready()

    def record_replica_metadata(self) -> dict[str, str]:
        """Return what routers are told of this replica."""
        return {URL: self._server.url}

    def check_health(self) -> None:
        """Raise if the server has ended by itself; Ray Serve then replaces the replica."""
        if not self._is_stopping:
            self._server.check_runs()

    async def stop(self) -> None:
        """Let the server drain, which ends what takes too long with an error; return at its end.

        Ray Serve itself would kill the replica, and the answers that clients wait for with it.
        """
        self._is_stopping = True
        await asyncio.to_thread(self._server.stop, self._drain_timeout_s)

    async def answer(self, call: Call) -> AsyncIterator[Head | bytes]:
        """Yield the beginning of the answer, and then its body as it comes.

        It is a 502 if the server breaks off before it answers.  Raises aiohttp.ClientError if it
        breaks off later.
        """
        has_begun = False
        try:
            async with self._opened().request(
                call.method,
                self._server.url + call.target,
                data=call.content,
                headers=call.headers,
                allow_redirects=False,
                skip_auto_headers=SKIPPED,
            ) as response:
                has_begun = True
                yield Head(self._server.url, response.status, answered(response.raw_headers))
                async for piece in response.content.iter_any():
                    yield piece
        except (aiohttp.ClientError, OSError) as error:
            if has_begun:
                raise
            why = f"the server at {self._server.url} broke off: {describe(error)}"
            failed = replica_failed(why).response()
            yield Head(self._server.url, failed.status_code, failed.raw_headers)
            yield bytes(failed.body)

    def __del__(self) -> None:
        self._server.stop(self._drain_timeout_s)

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                timeout=aiohttp.ClientTimeout(total=None),
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self._session
