"""Every error that a client can see, in OpenAI's format."""

from __future__ import annotations

import math
from collections.abc import Mapping

from starlette.responses import JSONResponse

from slosched.core import EndReason, Refusal

_WHY_REJECTED = {
    EndReason.EXPIRED: "its time-to-first-token deadline passed while it waited",
    EndReason.INFEASIBLE: "what was left until its time-to-first-token deadline was less than its "
    "prompt takes even alone on the device",
    EndReason.CASCADE: "serving it would make several queued requests late",
    EndReason.QUEUE_FULL: "as many requests are waiting as may, none of them less urgent",
    EndReason.OVERLOAD: "its first token is expected too late behind the other requests",
    EndReason.SIBLING: "another answer to the same prompt was rejected",
    EndReason.UNKEEPABLE: "not even alone on this device could its SLO be kept",
}


class ApiError(Exception):
    """An error response: `{"error": {"message", "type", "param", "code"}}` and `details`."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        reason: EndReason | None = None,
        retry_after_s: float | None = None,
        closes: bool = False,
        details: Mapping[str, object] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.reason = reason
        self.retry_after_s = retry_after_s
        self.closes = closes
        self.details = details or {}

    def body(self) -> dict[str, object]:
        error: dict[str, object] = {
            "message": self.message,
            "type": self.kind,
            "param": self.param,
            "code": self.code,
        }
        if self.reason is not None:
            error["reason"] = self.reason.value
        error |= self.details
        return {"error": error}

    def response(self) -> JSONResponse:
        headers = {}
        if self.retry_after_s is not None:
            headers["retry-after"] = str(math.ceil(self.retry_after_s))
        if self.closes:
            headers["connection"] = "close"
        return JSONResponse(self.body(), self.status, headers)


def not_serving(why: str, retry_after_s: float) -> ApiError:
    return ApiError(
        503,
        f"the server takes no requests: {why}",
        kind="service_unavailable",
        code="not_serving",
        retry_after_s=retry_after_s,
    )


def too_long(
    num_prompt_tokens: int, max_tokens: int, limit_tokens: int, *, is_estimate: bool = False
) -> ApiError:
    """Return a 400; as an estimate, `num_prompt_tokens` is what the prompt has at least."""
    at_least = "at least " if is_estimate else ""
    return ApiError(
        400,
        f"the prompt has {at_least}{num_prompt_tokens} tokens and {max_tokens} output tokens are "
        f"asked for, but prompt and output together may have {limit_tokens}; shorten the prompt or "
        "max_tokens",
        param="max_tokens" if num_prompt_tokens < limit_tokens else "prompt",
        code="context_length_exceeded",
        reason=EndReason.TOO_LONG,
    )


def never_fits(num_tokens: int, kv_tokens: int) -> ApiError:
    """Return a 400 to a request that the empty KV cache could not hold."""
    why = (
        f"prompt and max_tokens together are {num_tokens} tokens, which can never fit into the KV "
        f"cache of {kv_tokens}; shorten the prompt or max_tokens"
    )
    return ApiError(400, why, code="context_length_exceeded", reason=EndReason.TOO_LONG)


def not_cut(num_prompt_tokens: int, step_tokens: int) -> ApiError:
    """Return a 400 to a request that the policy, not the KV cache, finds too long."""
    why = (
        f"the policy takes no prompt of {num_prompt_tokens} tokens where a step has at most "
        f"{step_tokens}; shorten the prompt (the operator can raise --max-num-batched-tokens or "
        "choose a policy that cuts prompts)"
    )
    code = "context_length_exceeded"
    return ApiError(400, why, param="prompt", code=code, reason=EndReason.TOO_LONG)


def too_large(limit_bytes: int, limit_tokens: int) -> ApiError:
    """Return a 413 that closes the connection, so that the rest of the body is not read."""
    return ApiError(
        413,
        f"the body has more than {limit_bytes} bytes, which is far more than the {limit_tokens} "
        "tokens that prompt and output together may have",
        code="body_too_large",
        closes=True,
    )


def encoded(encodings: str) -> ApiError:
    """Return a 415 to a body that is compressed, or encoded in another way."""
    return ApiError(
        415,
        f"the body has Content-Encoding: {encodings:.100}, but this server takes only bodies as "
        "they are; send it without compression and without this header",
        code="unsupported_encoding",
    )


def headers_too_large(most_bytes: int) -> ApiError:
    return ApiError(
        431,
        f"the headers have more than {most_bytes} bytes; send fewer or shorter ones",
        code="headers_too_large",
        closes=True,
    )


def too_many_values(most: int) -> ApiError:
    return ApiError(
        413,
        f"the body has more than {most} values, where a list, an object or a member counts as "
        "eight; send fewer in one request",
        code="body_too_large",
    )


def too_many_requests(most: int) -> ApiError:
    """Return a 503 that closes the connection, so that the body is not read."""
    return ApiError(
        503,
        f"the server is answering {most} requests, as many as it may at once; come again",
        kind="service_unavailable",
        code="too_many_requests",
        retry_after_s=1.0,
        closes=True,
    )


def wrong_key(wanted: str = "this server wants an API key that it knows") -> ApiError:
    return ApiError(
        401,
        f"{wanted}, in the header Authorization: Bearer <key>",
        code="invalid_api_key",
        closes=True,
    )


def too_slow(num_bytes: int, timeout_s: float) -> ApiError:
    return ApiError(
        408,
        f"{num_bytes} bytes of the body came within {timeout_s:g} s, and not its end",
        code="request_timeout",
        closes=True,
    )


def of_refusal(refusal: Refusal) -> ApiError:
    """Return the error response to a request that is refused on arrival."""
    expected_ms, promised_ms = 1000 * refusal.expected_s, 1000 * refusal.promised_s
    times = f"{expected_ms:.1f} ms, but {promised_ms:g} ms are asked for"
    retry_after_s = refusal.retry_after_s
    if retry_after_s is None:
        what = "the prompt takes" if refusal.promise == "TTFT" else "an output token takes"
        why = f"alone on this device {what} {times}; ask for a longer {refusal.promise}"
    else:
        why = (
            f"behind the other requests a {refusal.promise} of {times}; "
            f"come again in {retry_after_s:.1f} s, or ask for a longer {refusal.promise}"
        )
    details: dict[str, object] = {
        "promise": refusal.promise.lower(),
        "expected_ms": expected_ms,
        "promised_ms": promised_ms,
        "retry_after_ms": None if retry_after_s is None else 1000 * retry_after_s,
    }
    return ApiError(
        429,
        f"refused ({refusal.reason.value}): {why}, or send slo_best_effort=true",
        kind="rate_limit_exceeded",
        code="slo_infeasible",
        reason=refusal.reason,
        retry_after_s=retry_after_s,
        details=details,
    )


def is_for_later(reason: EndReason) -> bool:
    """Tell whether a request that ended for this reason may be served if it comes again."""
    return reason in _WHY_REJECTED and reason is not EndReason.UNKEEPABLE


def of_end(reason: EndReason, detail: str, retry_after_s: float) -> ApiError:
    """Return the error response to a request that ended without finishing."""
    if reason in _WHY_REJECTED:
        later_s = retry_after_s if is_for_later(reason) else None
        mend = "retry later, elsewhere or with a longer SLO"
        if later_s is None:
            mend = "ask for a longer one, or send slo_best_effort=true"
        return ApiError(
            429,
            f"rejected ({reason.value}): {_WHY_REJECTED[reason]}; {mend}",
            kind="rate_limit_exceeded",
            code="slo_infeasible",
            reason=reason,
            retry_after_s=later_s,
            details={"retry_after_ms": None if later_s is None else 1000 * later_s},
        )
    if reason is EndReason.SHUTDOWN:
        return ApiError(
            503,
            "the server shut down before the request was finished",
            kind="service_unavailable",
            code="shutdown",
            reason=reason,
            retry_after_s=retry_after_s,
        )
    if reason is EndReason.TIMEOUT:
        return ApiError(
            504,
            "the request took longer than the server lets one take (--request-timeout)",
            kind="server_error",
            code="request_timeout",
            reason=reason,
        )
    if reason is EndReason.NO_TOKEN:
        return ApiError(
            400,
            f"the output cannot go on: {detail or 'its rules leave no token'}",
            code="no_token",
            reason=reason,
        )
    if reason is EndReason.CLIENT:
        why = "the client went away, or the operator aborted the request"
        return ApiError(499, why, code="client_closed_request", reason=reason)
    return ApiError(
        500,
        f"the engine failed while it ran this request: {detail or 'no detail is known'}",
        kind="server_error",
        code="engine_fault",
        reason=reason,
    )
