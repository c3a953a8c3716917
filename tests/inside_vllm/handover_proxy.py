"""A proxy in front of two vLLM servers: one computes a prompt, the other one answers it.

It does what vLLM's example proxies for disaggregated prefill do: the first server gets the request
with `max_tokens` 1 and `do_remote_decode`, and the second one gets the request itself with the
`kv_transfer_params` of the first one's answer.  An error of the first one is the client's answer.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import NamedTuple

from small_server import answering

_LIMIT_S = 300.0


class Answer(NamedTuple):
    """What a server said."""

    status: int
    retry_after: str | None
    body: bytes


@contextmanager
def proxy(prefill_url: str, decode_url: str) -> Iterator[str]:
    """Yield the URL of a running proxy."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            slo = {name: v for name, v in self.headers.items() if name.lower().startswith("x-slo-")}
            first = {**body, "max_tokens": 1, "stream": False}
            first["kv_transfer_params"] = {"do_remote_decode": True, "do_remote_prefill": False}
            answer = _post(prefill_url + self.path, first, slo)
            if answer.status == 200:
                handed = json.loads(answer.body)["kv_transfer_params"]
                body["kv_transfer_params"] = handed
                answer = _post(decode_url + self.path, body, slo)
            self.send_response(answer.status)
            if answer.retry_after is not None:
                self.send_header("retry-after", answer.retry_after)
            self.send_header("content-length", str(len(answer.body)))
            self.end_headers()
            self.wfile.write(answer.body)

    with answering(Handler) as url:
        yield url


def _post(url: str, body: object, headers: dict[str, str]) -> Answer:
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"content-type": "application/json", **headers}
    )
    try:
        with urllib.request.urlopen(request, timeout=_LIMIT_S) as answer:
            return Answer(answer.status, answer.headers["retry-after"], answer.read())
    except urllib.error.HTTPError as error:
        return Answer(error.code, error.headers["retry-after"], error.read())
