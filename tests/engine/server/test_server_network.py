"""HTTPS, CORS, a root path, and limits on the time and number of requests, with real clients."""

from __future__ import annotations

import asyncio
import json
import ssl
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from factories import make_model
from live_server import Live, live, post, with_client
from test_server_faults import raw_request

from slosched.cli.network_options import NetworkOptions
from slosched.core import EndReason
from slosched.engine.server import CertificateError, ServerConfig, TLSFiles


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> TLSFiles:
    """A certificate of 127.0.0.1 that vouches for itself."""
    folder = tmp_path_factory.mktemp("tls")
    files = TLSFiles(folder / "cert.pem", folder / "key.pem")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
         "-nodes", "-days", "2", "-subj", "/CN=test", "-addext", "subjectAltName=IP:127.0.0.1",
         "-keyout", files.keyfile, "-out", files.certfile],
        check=True, capture_output=True,
    )  # fmt: skip
    return files


def test_https_with_a_client_that_checks_the_certificate(certificate: TLSFiles) -> None:
    with live(tls=certificate) as server:
        assert server.url.startswith("https://127.0.0.1:")
        trusting = ssl.create_default_context(cafile=str(certificate.certfile))
        body = json.dumps({"prompt": "abc", "max_tokens": 5, "stream": True}).encode()
        request = urllib.request.Request(
            f"{server.url}/v1/completions", body, {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=10, context=trusting) as answer:
            assert answer.read().count(b"data: ") == 6
        with pytest.raises(OSError, match="CERTIFICATE_VERIFY_FAILED"):
            urllib.request.urlopen(request, timeout=10, context=ssl.create_default_context())


def test_a_client_that_leaves_over_https_frees_its_request(certificate: TLSFiles) -> None:
    trusting = ssl.create_default_context(cafile=str(certificate.certfile))
    with live(tls=certificate, max_model_len=1024) as server:
        body = json.dumps({"prompt": "abc", "max_tokens": 900, "stream": True}).encode()
        request = urllib.request.Request(
            f"{server.url}/v1/completions", body, {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=10, context=trusting) as answer:
            answer.read(10)
        server.device.released.get(timeout=10)
        assert server.worker.metrics.num_ended(EndReason.CLIENT) == 1


def test_files_that_are_no_certificate_are_refused_at_the_start(tmp_path: Path) -> None:
    for name in ("cert.pem", "key.pem"):
        (tmp_path / name).write_text("nothing")
    options = NetworkOptions(ssl_certfile=tmp_path / "cert.pem", ssl_keyfile=tmp_path / "key.pem")
    with pytest.raises(CertificateError, match=r"cert\.pem"):
        options.tls()
    with pytest.raises(CertificateError, match=r"none\.pem"):
        NetworkOptions(ssl_certfile=tmp_path / "none.pem", ssl_keyfile=tmp_path / "none.pem").tls()
    with pytest.raises(ValueError, match="both"):
        NetworkOptions(ssl_certfile=tmp_path / "cert.pem").tls()


def test_allowed_origins_are_a_list_as_in_vllm_or_repeated() -> None:
    assert NetworkOptions(allowed_origins=['["a", "b"]', "c"]).origins() == ("a", "b", "c")
    for wrong in ("[1]", "[a"):
        with pytest.raises(ValueError, match="--allowed-origins"):
            NetworkOptions(allowed_origins=[wrong]).origins()


ORIGIN = "https://chat.example.com"


def answer_to(
    server: Live, method: str, path: str, headers: dict[str, str]
) -> tuple[int, dict[str, str]]:
    """Return the status and the headers, with small letters, of an answer."""

    async def ask(client: aiohttp.ClientSession) -> tuple[int, dict[str, str]]:
        async with client.request(method, path, headers=headers) as answer:
            return answer.status, {name.lower(): value for name, value in answer.headers.items()}

    return asyncio.run(with_client(server.url, ask))


@pytest.mark.parametrize("key", ["schlüssel", "\u65e5\U0001f511"])
def test_a_key_that_is_not_ascii_is_known_as_curl_and_the_router_send_it(key: str) -> None:
    with live(tenants={key: "acme"}) as server:
        for sent, status in ((key, 200), (key[1:], 401)):
            headers = {"authorization": f"Bearer {sent}"}
            assert answer_to(server, "GET", "/v1/models", headers)[0] == status


def question(origin: str) -> dict[str, str]:
    """Return the headers with which a browser asks whether a page may send a completion."""
    return {
        "origin": origin,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }


def test_pages_of_allowed_origins_may_use_it_and_others_not() -> None:
    with live(allowed_origins=(ORIGIN,), api_keys=("k",)) as server:
        status, headers = answer_to(server, "OPTIONS", "/v1/completions", question(ORIGIN))
        assert (status, headers["access-control-allow-origin"]) == (200, ORIGIN)
        assert "authorization" in headers["access-control-allow-headers"]
        status, headers = answer_to(server, "GET", "/v1/models", {"origin": ORIGIN})
        assert (status, headers["access-control-allow-origin"]) == (401, ORIGIN)
        assert "retry-after" in headers["access-control-expose-headers"]
        other = "https://evil.example.com"
        status, headers = answer_to(server, "OPTIONS", "/v1/completions", question(other))
        assert status == 400
        assert "access-control-allow-origin" not in headers


def test_without_allowed_origins_no_page_of_another_origin_may_use_it() -> None:
    with live() as server:
        _, headers = answer_to(server, "GET", "/v1/models", {"origin": ORIGIN})
        assert "access-control-allow-origin" not in headers


def test_a_root_path_may_be_in_requests_or_taken_off_by_the_proxy() -> None:
    with live(root_path="/llm", api_keys=("k",)) as server:
        for path, status in (("/llm/health", 200), ("/health", 200), ("/llm/v1/models", 401)):
            assert answer_to(server, "GET", path, {})[0] == status, path
        assert answer_to(server, "GET", "/llm/v1/models", {"authorization": "Bearer k"})[0] == 200
        assert answer_to(server, "GET", "/llmv1/models", {"authorization": "Bearer k"})[0] == 404
        page = server.get("/llm/metrics")[1]
        assert 'http_requests_total{handler="/v1/models",method="GET",status="2xx"} 1' in page
    with pytest.raises(ValueError, match="root_path begins with a slash"):
        ServerConfig("m", 10, root_path="llm/")


def test_a_request_that_takes_too_long_ends_with_an_error() -> None:
    """The answer does not wait for the step that runs."""
    with live(request_timeout_s=0.3, max_model_len=1024) as server:
        server.device.gate.clear()
        status, document, _ = server.post(prompt="abc", max_tokens=900)
        error = document["error"]
        assert (status, error["code"], error["reason"]) == (504, "request_timeout", "timeout")
        server.device.gate.set()
        server.device.released.get(timeout=10)
        assert server.worker.metrics.num_ended(EndReason.TIMEOUT) == 1
        assert server.post(prompt="abc", max_tokens=2)[0] == 200


def test_a_stream_that_takes_too_long_ends_with_an_error() -> None:
    with live(request_timeout_s=0.5, device_model=make_model(constant_s=0.02)) as server:
        *events, last = server.events(prompt="abc", max_tokens=400)
        assert last["error"]["code"] == "request_timeout"
        assert 1 <= len(events) < 400


def refused(server: Live) -> tuple[int, Any, Any]:
    """Return the first answer that comes while the device stands still, which is a refusal."""
    for _ in range(100):
        try:
            return asyncio.run(with_client(server.url, short_post))
        except TimeoutError:  # it was taken, as one of those before was not yet there
            continue
    raise AssertionError("nothing was refused")


async def short_post(client: aiohttp.ClientSession) -> tuple[int, Any, Any]:
    async with asyncio.timeout(0.5):
        return await post(client, prompt="abc", max_tokens=3)


def test_only_so_many_requests_for_text_are_answered_at_once() -> None:
    with live(max_requests=2) as server:
        server.device.gate.clear()
        body = {"prompt": "abc", "max_tokens": 3, "stream": True}
        with raw_request(server, body) as first, raw_request(server, body) as second:
            assert server.device.entered.wait(10)
            status, document, headers = refused(server)
            assert (status, document["error"]["code"]) == (503, "too_many_requests")
            assert headers["retry-after"] == "1"
            assert server.get("/health")[0] == 200
            server.device.gate.set()
            for client in (first, second):
                received = b""
                while b"[DONE]" not in received:
                    received += client.recv(4096)
        assert server.post(prompt="abc", max_tokens=3)[0] == 200
