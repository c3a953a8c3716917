"""What a router has to know of a request, read from its headers and its body."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from slosched.core import SLO, OnInfeasible, Request
from slosched.engine.server.errors import ApiError
from slosched.engine.server.json_text import parse_json
from slosched.engine.server.slo import parse_slo
from slosched.gateway.asked_promises import Tier
from slosched.workload.http_slo import (
    BEST_EFFORT_FIELD,
    ON_INFEASIBLE_FIELD,
    PROMISES,
    TIER_FIELD,
    TIER_HEADERS,
)

_BLOCK_CHARS = 64
_BLOCK_IDS = 16
_CHARS_OF_A_MESSAGE = 16
"""What a chat template adds to each message, about."""
_FOR_VLLM = "vllm_xargs"
"""The object in which requests to vLLM say what requests to our server say in the body itself."""
_SAID_THERE = {
    **{names.field: names.field for names in PROMISES},
    ON_INFEASIBLE_FIELD: ON_INFEASIBLE_FIELD,
}
"""Fields of that object, and what they are called in the body."""
_TIER_THERE = "slo_tier"
_NO_TIERS = (None, "auto", "default")


class Asked(NamedTuple):
    """A request as the router sees it."""

    request: Request
    model: str | None
    may_be_refused: bool
    """Whether the router may refuse it if it would be late: not if the client, or the replicas for
    all who do not say, take a late answer instead, and not before they have told what they promise
    to its tier."""


class Promised(NamedTuple):
    """What is promised to requests that do not say it themselves."""

    slo: SLO
    on_infeasible: OnInfeasible | None
    """What becomes of them if that cannot be kept; None if nobody has told."""


def read(
    content: bytes | bytearray,
    headers: Mapping[str, str],
    promised_to: Callable[[Tier | None], Promised],
    bytes_per_token: float,
    *,
    with_prefixes: bool,
) -> Asked:
    """Return what the router has to know.

    The length of a prompt in text is estimated from its characters; token ids are counted.
    With `with_prefixes` the request has a hash for each block of its prompt.
    `promised_to` returns what the replicas promise to a tier, or without one.
    Raises ApiError (400) if the body is no JSON object, or if its SLO cannot be read.  All other
    fields are checked by the replica.
    """
    try:
        body = parse_json(content)
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise ApiError(400, f"the body must be a JSON object, not {body!r:.100}")
    xargs = found if isinstance(found := body.get(_FOR_VLLM), dict) else {}
    body |= {name: xargs[field] for field, name in _SAID_THERE.items() if field in xargs}
    promised = promised_to(_tier(body, xargs, headers))
    prompt = _prompt(body)
    if isinstance(prompt, str):
        num_tokens, block_tokens = len(prompt) / bytes_per_token, _BLOCK_CHARS / bytes_per_token
    else:
        num_tokens, block_tokens = len(prompt), _BLOCK_IDS
    request = Request(
        "",
        0.0,
        max(1, round(num_tokens)),
        max_tokens=1,
        slo=parse_slo(headers, body, promised.slo),
    )
    if with_prefixes:
        request.prefix_hashes = list(_hashes(prompt))
        request.prefix_block_tokens = max(1, round(block_tokens))
    model = body.get("model")
    may_be_refused = promised.on_infeasible is not None and _may_refuse(
        body, promised.on_infeasible
    )
    return Asked(request, model if isinstance(model, str) else None, may_be_refused)


def _tier(
    body: Mapping[str, object], xargs: Mapping[str, object], headers: Mapping[str, str]
) -> Tier | None:
    """Return the tier that the request names, if any: in vLLM's object, its body or a header."""
    if (name := xargs.get(_TIER_THERE)) not in _NO_TIERS:
        return Tier(_TIER_THERE, str(name))
    if (name := body.get(TIER_FIELD)) not in _NO_TIERS:
        return Tier(TIER_FIELD, str(name))
    header = next((name for name in TIER_HEADERS if name in headers), None)
    return None if header is None else Tier(TIER_FIELD, headers[header])


def _may_refuse(body: Mapping[str, object], default: OnInfeasible) -> bool:
    takes_late = body.get(BEST_EFFORT_FIELD) is True
    asked = body.get(ON_INFEASIBLE_FIELD)
    on_infeasible = default.value if asked is None else asked
    return not takes_late and on_infeasible == OnInfeasible.REJECT.value


def _prompt(body: Mapping[str, Any]) -> str | list[int]:
    """Return the prompt: text, or token ids.  Several prompts are taken as one long one."""
    if "input" in body:  # of /v1/responses
        return _as_text(body.get("instructions")) + _as_text(body["input"])
    messages = body.get("messages")
    if isinstance(messages, list):
        return _as_text(messages)
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, list) or not prompt:
        return ""
    if isinstance(prompt[0], str):
        return "".join(each for each in prompt if isinstance(each, str))
    if isinstance(prompt[0], list):
        return [token for each in prompt if isinstance(each, list) for token in each]
    return prompt


def _as_text(said: object) -> str:
    """Return what is said in one text, or in a list of messages."""
    if isinstance(said, list):
        return "".join(map(_message, said))
    return said if isinstance(said, str) else ""


def _message(message: object) -> str:
    """Return the text of a message, with some characters for what the template adds.

    A call of a function, and what the function returned, are items like messages in the input of
    /v1/responses.
    """
    if not isinstance(message, dict):
        return ""
    content = message.get("content")
    parts = content if isinstance(content, list) else [{"text": content}]
    texts = [part.get("text") for part in parts if isinstance(part, dict)]
    texts += [message.get("arguments"), message.get("output")]
    role = str(message.get("role"))[:_CHARS_OF_A_MESSAGE].ljust(_CHARS_OF_A_MESSAGE)
    return role + "".join(text for text in texts if isinstance(text, str))


def _hashes(prompt: str | list[int]) -> Iterator[int]:
    """Yield a hash for each full block, which depends on all that is before it, too."""
    size = _BLOCK_CHARS if isinstance(prompt, str) else _BLOCK_IDS
    before = 0
    for end in range(size, len(prompt) + 1, size):
        block = prompt[end - size : end]
        before = hash((before, block if isinstance(block, str) else str(block)))
        yield before
