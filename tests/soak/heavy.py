"""Bodies as large as a server takes them, each slow to handle in another way."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from soak.fuzzer import LIMIT_FIELD, Sent


def heavy(max_model_len: int) -> Iterator[Sent]:
    """Yield bodies around the limits of a server with this context."""
    num_ids = max_model_len - 16
    ids = [255] * num_ids
    call = {"id": "1", "function": {"name": "f", "arguments": json.dumps({"a": [[]] * 30_000})}}
    many: dict[str, Any] = {
        "the longest prompt of ids": {"prompt": ids},
        "floats for ids": {"prompt": [1.5] * num_ids},
        "strings for ids": {"prompt": ["a"] * num_ids},
        "far too many lists": {"prompt": [[]] * num_ids},
        "as many lists as may be": {"prompt": [[]] * (num_ids // 10)},
        "as many members as may be": {str(i): i for i in range(num_ids // 20)},
        "the longest text": {"prompt": "a" * num_ids},
        "a far too long text": {"prompt": "a " * (4 * num_ids)},
        "a text of commas": {"prompt": "," * (4 * num_ids)},
        "a text of quotation marks": {"prompt": '"' * num_ids},
        "a text of backslashes": {"prompt": "\\" * (4 * num_ids)},
        "a number for text": {"prompt": 1e300, "stop": ["b" * 512] * 16},
        "a field that holds everything": {"prompt": "x", "logit_bias": ids},
    }
    for body in many.values():
        yield _sent("/v1/completions", body)
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}]
    yield _sent("/v1/chat/completions", {"messages": messages})
    yield _sent("/v1/responses", {"input": "a" * num_ids})
    yield _sent("/tokenize", {"prompt": "a" * num_ids})
    yield _sent("/detokenize", {"tokens": ids})
    for text in (b"[" * 10**6, b'{"a":' + b"9" * 10**6 + b"}", b'"' + b"\\u00e4" * 10**6 + b'"'):
        yield Sent("/v1/completions", text)


def _sent(path: str, body: dict[str, Any]) -> Sent:
    name = LIMIT_FIELD.get(path)
    limit = {} if name is None else {name: 1}
    return Sent(path, json.dumps(body | limit).encode())
