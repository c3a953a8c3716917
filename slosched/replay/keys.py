"""The key with which a client asks a server that asks for one."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus

KEY_STATUSES = frozenset({HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN})
"""Statuses of an answer to a request without the key, or with a wrong one."""


def key_headers(api_key: str | None) -> Mapping[str, str]:
    """Return the header of a request with this key; none without a key."""
    return {} if api_key is None else {"authorization": f"Bearer {api_key}"}


def why_no_key(status: int, api_key: str | None) -> str:
    """Return what is wrong, in words, where a server answered with one of `KEY_STATUSES`."""
    kind = "a key" if api_key is None else "another key"
    return f"it asks for {kind} (HTTP {status}): give it with --api-key or in SLOSCHED_API_KEY"
