"""Bodies of all kinds, made from the server's own tables of the fields that it obeys."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slosched.engine.server.fields import (
    CHAT_FIELDS,
    COMPLETION_FIELDS,
    DETOKENIZE_FIELDS,
    RESPONSES_FIELDS,
    TOKENIZE_FIELDS,
)
from slosched.workload.http_slo import (
    BEST_EFFORT_FIELD,
    ON_INFEASIBLE_FIELD,
    PROMISES,
    TENANT_HEADERS,
    TIER_HEADERS,
)

ENDPOINTS: Mapping[str, frozenset[str]] = {
    "/v1/completions": COMPLETION_FIELDS,
    "/v1/chat/completions": CHAT_FIELDS,
    "/v1/responses": RESPONSES_FIELDS,
    "/tokenize": TOKENIZE_FIELDS,
    "/detokenize": DETOKENIZE_FIELDS,
}
_MAX_TOKENS = 8
"""Most tokens of an answer whose body has no odd limit of its own."""
LIMIT_FIELD = {
    "/v1/completions": "max_tokens",
    "/v1/chat/completions": "max_completion_tokens",
    "/v1/responses": "max_output_tokens",
}
_USER = {"role": "user", "content": "fuzz"}
_SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
_TOOL = {"type": "function", "function": {"name": "f", "parameters": _SCHEMA}}
_NEEDED: Mapping[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "fuzz"},
    "/v1/chat/completions": {"messages": [_USER]},
    "/v1/responses": {"input": "fuzz"},
    "/tokenize": {"prompt": "fuzz"},
    "/detokenize": {"tokens": [5, 6, 7]},
}
"""What a body of each endpoint must have."""
_GOOD: Mapping[str, Sequence[Any]] = {
    "prompt": ("fuzz", "🙂 wörds", [5, 6, 7], ["one", "two"], [[5, 6], [7]], "long " * 300),
    "messages": ([_USER], [{"role": "system", "content": [{"type": "text", "text": "x"}]}, _USER]),
    "input": ("fuzz", [_USER]),
    "instructions": ("be brief",),
    "tokens": ([5, 6, 7], [255] * 50),
    "max_tokens": (0, 1, 5, _MAX_TOKENS),
    "max_completion_tokens": (1, _MAX_TOKENS),
    "max_output_tokens": (1, _MAX_TOKENS),
    "stream": (True, True, False),
    "stream_options": ({"include_usage": True, "continuous_usage_stats": True},),
    "temperature": (0, 0.7, 1, 2, 100, 1e-30),
    "top_p": (0, 0.5, 1, 1e-30),
    "top_k": (-1, 0, 1, 40, 10**9),
    "min_p": (0, 0.1, 1),
    "seed": (0, -1, 2**63),
    "stop": ("a", ["a", "b"], ["a" * 512] * 16),
    "stop_token_ids": ([5], list(range(100))),
    "min_tokens": (0, 1, 4),
    "ignore_eos": (True, False),
    "allowed_token_ids": ([5], list(range(200))),
    "bad_words": (["a"], ["bad word", "x"]),
    "logit_bias": ({"5": 3}, {"5": -100, "6": 100}),
    "logprobs": (True, 0, 3, 20),
    "top_logprobs": (0, 1, 20),
    "prompt_logprobs": (0, 1, 20),
    "echo": (True, True, False),
    "include": (["message.output_text.logprobs"], []),
    "presence_penalty": (0, -2, 0.5),
    "frequency_penalty": (0, 2, -0.5),
    "repetition_penalty": (1, 0.01, 1.3, 100),
    "n": (1, 2, 5),
    "best_of": (1, 2, 6),
    "use_beam_search": (True, False),
    "length_penalty": (1, 0.5),
    "priority": (0, -5, 7),
    "cache_salt": ("salt",),
    "service_tier": ("auto", "default"),
    "truncate_prompt_tokens": (-1, 1, 100),
    "response_format": (
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": _SCHEMA}},
    ),
    "structured_outputs": ({"regex": "[a-z]+"}, {"choice": ["yes", "no"]}, {"json": _SCHEMA}),
    "guided_json": (_SCHEMA,),
    "guided_regex": ("[0-9]{3}", "(a|b)*", "("),
    "guided_choice": (["yes", "no"],),
    "guided_grammar": ('root ::= "a" root | "b"', "start: /[a-z]+/"),
    "tools": ([_TOOL], [_TOOL, _TOOL]),
    "tool_choice": ("auto", "required", "none", {"type": "function", "function": {"name": "f"}}),
    "parallel_tool_calls": (True, False),
    "text": ({"format": {"type": "text"}},),
    "metadata": ({"a": "b"}, {"a": "\ud800"}),
    "chat_template_kwargs": ({"a": 1},),
    ON_INFEASIBLE_FIELD: ("reject", "relegate", "serve"),
    BEST_EFFORT_FIELD: (True, False),
    **{names.field: (0.001, 100, 5000, 1e9) for names in PROMISES},
}
"""Values that are right, or nearly so, for the fields that have any of their own."""
_ODD: Sequence[Any] = (
    None, True, False, 0, 1, -1, 2, 1e39, -1e39, 1e-320, 10**400, 0.5, "", "x", "x" * 5000,
    "\ud800", "\x00", "NaN", [], [1], ["a"], [[1]], [None], [0] * 3000, {}, {"a": 1}, {"type": "x"},
    list(range(256)), "a" * 512, ["a" * 512] * 16, [[[[[[]]]]]], {"a": {"b": {"c": []}}}, 2**31,
    2**63, -(2**63), "🙂" * 700, [-1], [10**9], "false", "1", float(2**53),
    {"\ud800": "\ud800"}, ["\ud800"], [{"type": "x"}], [{"role": "user", "content": "\ud800"}],
    {"type": "json_schema", "json_schema": {"name": "\ud800", "schema": {"const": "\ud800"}}},
)  # fmt: skip
_ODD_FIELDS = ("made_up", "slo_made_up", "suffix", "request_id")
_ODD_JSON = (
    b"", b"null", b"[]", b'"x"', b"{", b"{}", b"\xff\xfe", b"[" * 5000, b'{"a":' * 5000, b"NaN",
    b'{"prompt": NaN}', b'{"prompt": "a", "prompt": "b", "max_tokens": 1}', b"1" * 5000,
    b'{"max_tokens": ' + b"9" * 5000 + b"}", b'{"prompt": "\x00"}', b'\xef\xbb\xbf{"prompt": "x"}',
)  # fmt: skip
_ODD_HEADERS = ("", "0", "-1", "nan", "inf", "1e999", "x", "9" * 400, "\xff", "100, 200", "0.001")


@dataclass(frozen=True)
class Sent:
    """One request as it is sent."""

    path: str
    body: bytes
    method: str = "POST"
    headers: Mapping[str, str] = field(default_factory=dict)


class Fuzzer:
    """Makes requests from chance alone; the same `rng` makes the same ones."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def next(self) -> Sent:
        """Return the next request: mostly one that is nearly right, and sometimes any bytes."""
        rng = self._rng
        path = rng.choice((*ENDPOINTS, "/v1/completions", "/v1/chat/completions"))
        kind = rng.random()
        if kind < 0.03:
            return Sent(path, rng.choice(_ODD_JSON))
        if kind < 0.05:
            query = rng.choice(("", "?prompt_tokens=9", "?prompt_tokens=-1", "?prompt_tokens=9,x"))
            return Sent(f"/v1/quote{query}", b"", "GET")
        body = json.dumps(self._body(path)).encode()
        if kind < 0.08:
            body = self._damaged(body)
        return Sent(path, body, headers=self._headers())

    def _body(self, path: str) -> dict[str, Any]:
        """Return a body with a few fields of the endpoint; one in three has only right values."""
        rng = self._rng
        names = sorted({*ENDPOINTS[path], *(names.field for names in PROMISES)} - {"model"})
        chosen = rng.sample(names, min(len(names), rng.choice((0, 1, 1, 2, 3, 5, 8))))
        is_right = rng.random() < 0.4
        value = self._right if is_right else self._any
        body = {name: value(name) for name in chosen}
        if is_right or rng.random() < 0.7:
            body = _NEEDED[path] | body
        if not is_right and rng.random() < 0.2:
            body[rng.choice((*_ODD_FIELDS, "model"))] = rng.choice(_ODD)
        limit = LIMIT_FIELD.get(path)
        limits = [body.get(name) for name in (limit, "max_tokens")]
        if limit is not None and limits == [None, None]:  # null is no limit, either
            body[limit] = rng.randint(1, _MAX_TOKENS)  # else a chat fills the whole context
        return body

    def _right(self, name: str) -> Any:
        return self._rng.choice(_GOOD.get(name, (None, True)))

    def _any(self, name: str) -> Any:
        if self._rng.random() < 0.5:
            return self._right(name)
        return self._rng.choice(_ODD)

    def _damaged(self, body: bytes) -> bytes:
        """Return a body that is cut off, or has other bytes in some places."""
        rng = self._rng
        if rng.random() < 0.5:
            return body[: rng.randint(0, len(body))]
        damaged = bytearray(body)
        for _ in range(rng.randint(1, 5)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        return bytes(damaged)

    def _headers(self) -> dict[str, str]:
        rng = self._rng
        if rng.random() < 0.85:
            return {}
        names = [*(header for names in PROMISES for header in names.headers)]
        names += [*TIER_HEADERS, *TENANT_HEADERS, "x-request-id", "content-type", "authorization"]
        return {name: rng.choice(_ODD_HEADERS) for name in rng.sample(names, rng.randint(1, 3))}
