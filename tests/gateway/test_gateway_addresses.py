"""Addresses of replicas that a router refuses, since nobody could be reached there."""

from __future__ import annotations

import pytest

from slosched.gateway.gateway import Gateway


@pytest.mark.parametrize(
    "url",
    [
        "http://a:abc",
        "http://a:99999",
        "http://a:0",
        "http://[::1",
        "http://a:8000#b",
        "http://a:8000?b",
        "http://:8000",
        "ftp://a:8000",
    ],
)
def test_what_is_no_address_is_refused_at_the_start(url: str) -> None:
    """It was taken, and then the replica was down for ever without a reason."""
    with pytest.raises(ValueError, match="is no address of a server; write http:"):
        Gateway([url], "round_robin")


@pytest.mark.parametrize("url", ["http://me:secret@a:8000", "http://me@a:8000"])
def test_keys_do_not_belong_into_an_address(url: str) -> None:
    """With one there, each request of a client with a key of its own ended as a 500."""
    with pytest.raises(ValueError, match=r"leave out user and password.*--api-key") as raised:
        Gateway([url], "round_robin")
    assert "secret" not in str(raised.value)


def test_addresses_of_servers_are_taken() -> None:
    urls = ["http://a", "https://a:8000/base/", "http://[::1]:8000", "HTTP://A:8001"]
    gateway = Gateway(urls, "round_robin")
    assert [each.url for each in gateway.fleet.replicas] == [url.rstrip("/") for url in urls]
