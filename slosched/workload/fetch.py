"""Downloads of public traces; a file is kept whole and with the right checksum, or not at all."""

from __future__ import annotations

import hashlib
import http.client
import os
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from slosched.core import SloschedError
from slosched.workload.public import public_trace

_CHUNK_BYTES = 1 << 16
_TIMEOUT_S = 60.0
"""Seconds without data after which a connection is given up."""

Progress = Callable[[int, int | None], None]
"""A function of the bytes received so far and of the total, which is None if it is unknown."""


class FetchError(SloschedError):
    """A file could not be fetched, or is not the one that was asked for; nothing was kept."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """A file that is now on this machine."""

    path: Path
    sha256: str
    was_there: bool
    """Whether the file had been fetched before and was left as it is."""


def traces_dir() -> Path:
    """Return the directory of the traces.

    `$SLOSCHED_CACHE/traces`, else `$XDG_CACHE_HOME/slosched/traces`, else below `~/.cache`.
    """
    if explicit := os.environ.get("SLOSCHED_CACHE"):
        return Path(explicit) / "traces"
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(caches) / "slosched" / "traces"


def cached_trace(name: str) -> Path:
    """Return where `fetch_trace` puts the public trace of this name, which need not exist yet."""
    return traces_dir() / f"{name}{public_trace(name).suffix}"


def fetch_trace(
    name: str,
    target: Path | None = None,
    *,
    url: str | None = None,
    sha256: str | None = None,
    anew: bool = False,
    on_progress: Progress | None = None,
) -> Fetched:
    """Fetch the public trace of this name, as its publisher has it, to `target` or the cache.

    `url` is another address of the same file, and `sha256` a checksum to insist on instead of the
    known one. `anew` fetches the file even if it is there.  Raises ValueError for an unknown name
    or an invalid checksum, and FetchError if the file cannot be fetched or is another one.
    """
    trace = public_trace(name)
    if sha256 is not None and not _is_sha256(sha256):
        raise ValueError(f"a sha256 is 64 hexadecimal digits, not {sha256!r}")
    expected = trace.sha256 if sha256 is None else sha256.lower()
    target = cached_trace(name) if target is None else target
    if target.exists() and not anew:
        with target.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != expected:
            raise FetchError(
                f"{target} is there, but is not {name}: its sha256 is {found}, not {expected}; "
                "fetch it anew (--anew) or elsewhere (--out)"
            )
        return Fetched(target, found, was_there=True)
    found = download(url or trace.url, target, expected, on_progress)
    return Fetched(target, found, was_there=False)


def download(url: str, target: Path, sha256: str, on_progress: Progress | None = None) -> str:
    """Fetch a file and return its sha256; `target` appears complete and right, or not at all."""
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, partial = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            digest = hashlib.sha256()

            def keep(chunk: bytes) -> None:
                digest.update(chunk)
                file.write(chunk)

            _receive(url, keep, on_progress or (lambda _done, _total: None))
        found = digest.hexdigest()
        if found != sha256:
            raise FetchError(
                f"what {url} sent is not what was expected: its sha256 is {found}, not {sha256}; "
                "nothing was kept.  If you trust it, pin it: --sha256"
            )
        Path(partial).chmod(0o644)  # mkstemp lets only the owner read
        Path(partial).replace(target)
    finally:
        Path(partial).unlink(missing_ok=True)
    return found


def _receive(url: str, keep: Callable[[bytes], None], on_progress: Progress) -> None:
    request = urllib.request.Request(url, headers={"User-Agent": "slosched"})
    try:
        response = urllib.request.urlopen(request, timeout=_TIMEOUT_S)
    except urllib.error.HTTPError as error:
        error.close()
        raise FetchError(f"{url} answers {error.code} {error.reason}; nothing was kept") from None
    except (OSError, http.client.HTTPException) as error:
        cause = getattr(error, "reason", error)
        why = getattr(cause, "strerror", None) or cause
        raise FetchError(f"cannot reach {url}: {why}; nothing was kept") from None
    with response:
        length = response.headers.get("Content-Length")
        total = int(length) if length and length.isdecimal() else None
        num_bytes = 0
        while chunk := _next_chunk(response, url, num_bytes):
            keep(chunk)
            num_bytes += len(chunk)
            on_progress(num_bytes, total)
    if total not in (None, num_bytes):
        raise _broken_off(url, num_bytes, f"of {total:,}")


def _next_chunk(response: http.client.HTTPResponse, url: str, num_bytes: int) -> bytes:
    try:
        return response.read(_CHUNK_BYTES)
    except (OSError, http.client.HTTPException) as error:
        raise _broken_off(url, num_bytes, str(error) or type(error).__name__) from None


def _broken_off(url: str, num_bytes: int, why: str) -> FetchError:
    return FetchError(
        f"the connection to {url} broke off after {num_bytes:,} bytes ({why}); "
        "nothing was kept: try again"
    )


def _is_sha256(text: str) -> bool:
    return len(text) == 64 and all(digit in "0123456789abcdefABCDEF" for digit in text)
