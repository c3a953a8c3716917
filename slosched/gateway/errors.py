"""The errors that a gateway answers with itself, in OpenAI's format."""

from __future__ import annotations

from collections.abc import Iterable

from slosched.core import EndReason
from slosched.engine.server.errors import ApiError


def no_replica(why: Iterable[str], retry_after_s: float) -> ApiError:
    """Return a 503: all replicas are down; `why` has the reason of each."""
    return ApiError(
        503,
        f"no replica can serve this request now: {'; '.join(why)}",
        kind="service_unavailable",
        code="no_replica",
        retry_after_s=retry_after_s,
    )


def replica_failed(why: str) -> ApiError:
    """Return a 502: the replica that was to answer did not, or broke off."""
    return ApiError(502, why, kind="server_error", code="replica_failed")


def took_too_long(timeout_s: float) -> ApiError:
    """Return a 504: the answer was not complete in time."""
    return ApiError(
        504,
        f"the request took longer than the {timeout_s:g} s that the router lets one take "
        "(--request-timeout)",
        kind="server_error",
        code="request_timeout",
        reason=EndReason.TIMEOUT,
    )


def no_such_model(name: str, known: Iterable[str]) -> ApiError:
    """Return a 404: no replica has the model."""
    models = ", ".join(map(repr, known)) or "none"
    return ApiError(
        404,
        f"no replica has a model {name!r:.100}; there are {models}",
        param="model",
        code="model_not_found",
    )


def never_in_time(alone_s: float, promised_s: float) -> ApiError:
    """Return a 429: not even alone on the fastest replica the first token would be in time.

    There is no use in coming again.
    """
    return _refused(
        EndReason.UNKEEPABLE,
        "even alone on the fastest replica",
        "ask for a longer TTFT",
        alone_s,
        promised_s,
        None,
    )


def too_late(expected_s: float, promised_s: float) -> ApiError:
    """Return a 429: on every replica even a lucky request would be later than promised.

    `expected_s` is the TTFT that one in ten requests would stay below on the best replica.
    """
    retry_after_s = max(1.0, expected_s - promised_s)
    return _refused(
        EndReason.OVERLOAD,
        "behind the other requests on every replica",
        f"come again in {retry_after_s:.1f} s, or ask for a longer TTFT",
        expected_s,
        promised_s,
        retry_after_s,
    )


def _refused(
    reason: EndReason,
    where: str,
    mend: str,
    expected_s: float,
    promised_s: float,
    retry_after_s: float | None,
) -> ApiError:
    expected_ms, promised_ms = 1000 * expected_s, 1000 * promised_s
    return ApiError(
        429,
        f"refused ({reason.value}): {where} a TTFT of at least {expected_ms:.1f} ms, but "
        f"{promised_ms:g} ms are asked for; {mend}, or send slo_best_effort=true",
        kind="rate_limit_exceeded",
        code="slo_infeasible",
        reason=reason,
        retry_after_s=retry_after_s,
        details={
            "promise": "ttft",
            "expected_ms": expected_ms,
            "promised_ms": promised_ms,
            "retry_after_ms": None if retry_after_s is None else 1000 * retry_after_s,
        },
    )
