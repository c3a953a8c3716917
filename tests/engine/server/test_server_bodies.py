"""Bodies that are hard to read: strings that are no text, and more values than are worth parsing."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Iterator
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from live_server import Live, live

from slosched.engine.server.json_limit import exceeds_work
from slosched.engine.server.json_text import parse_json
from slosched.engine.server.values import shown

HALF = "\ud800"
USER = {"role": "user", "content": "hi"}
CALL = {"id": "1", "function": {"name": "f", "arguments": json.dumps({"a": HALF})}}


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live(max_model_len=512, num_blocks=128) as running:
        yield running


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/v1/completions", {"prompt": "x", "bad_words": HALF}, "the body is not JSON: "),
        ("/v1/completions", {"prompt": "x", "stream_options": {HALF: 1}}, "the body is not JSON: "),
        ("/v1/completions", {"prompt": "x", HALF: 1}, "the body is not JSON: "),
        ("/v1/responses", {"input": "x", "metadata": {"a": HALF}}, "the body is not JSON: "),
        (
            "/v1/chat/completions",
            {"messages": [USER, {"role": "assistant", "tool_calls": [CALL]}]},
            "messages[1].tool_calls[0].function.arguments must be a JSON object as a string",
        ),
    ],
)
def test_half_a_surrogate_pair_is_refused_wherever_it_is(
    server: Live, path: str, body: dict[str, Any], message: str
) -> None:
    status, answer, _ = server.post(path, **body)
    assert status == 400
    assert answer["error"]["message"].startswith(message)


def test_whole_pairs_are_characters_however_they_are_spelt(server: Live) -> None:
    assert parse_json(rb'{"a": "\ud83d\ude42"}') == parse_json('{"a": "🙂"}'.encode())
    with pytest.raises(ValueError, match="surrogate"):
        parse_json(rb'["\ude42\ud83d"]')
    assert parse_json(b'\xef\xbb\xbf{"a": "\\\\ud800"}') == {"a": "\\ud800"}


@pytest.mark.parametrize("encoding", ["gzip", "GZIP", "identity, gzip", "x" * 1000])
def test_a_compressed_body_is_told_that_none_is_taken(server: Live, encoding: str) -> None:
    """It was told that its JSON was bad."""
    content = gzip.compress(json.dumps({"prompt": "x"}).encode())
    status, answer = sent(server, content, encoding)
    assert (status, answer["error"]["code"]) == (415, "unsupported_encoding")
    message = answer["error"]["message"]
    assert f"Content-Encoding: {encoding[:100]}, but" in message
    assert "send it without compression" in message


@pytest.mark.parametrize("encoding", ["", "identity", " Identity "])
def test_a_body_that_says_it_is_as_it_is_is_taken(server: Live, encoding: str) -> None:
    content = json.dumps({"prompt": "x", "max_tokens": 1}).encode()
    assert sent(server, content, encoding)[0] == 200


def sent(server: Live, content: bytes, encoding: str) -> tuple[int, Any]:
    """Return the answer to a body that says to be encoded so."""
    headers = {"content-type": "application/json", "content-encoding": encoding}
    url = f"{server.url}/v1/completions"
    try:
        with urlopen(Request(url, content, headers)) as answer:
            return answer.status, json.load(answer)
    except HTTPError as error:
        return error.code, json.load(error)


def exceeds(text: str, most: int) -> bool:
    return asyncio.run(exceeds_work(bytearray(text.encode()), most))


@pytest.mark.parametrize(
    "value",
    [[7] * 101, [[]] * 13, [{}] * 13, {str(i): 1 for i in range(13)}, [1.5] * 51, [1e300] * 51],
)
def test_what_takes_longer_counts_as_several_values(value: Any) -> None:
    assert exceeds(json.dumps(value), 100)
    assert not exceeds(json.dumps(value), 250)


@pytest.mark.parametrize("mark", [",", "[", ":", ".", "e", "\\", '\\"'])
def test_what_stands_in_a_string_is_no_value(mark: str) -> None:
    text = json.dumps({"prompt": mark * 1000, "n": 1})
    assert not exceeds(text, 1100)
    assert exceeds(text.replace("1}", f"{[1] * 1100}}}"), 1100)


def test_many_quotation_marks_are_too_many_values_too() -> None:
    assert exceeds(json.dumps(["," * 200, '"' * 200]), 100)


def test_a_body_with_too_many_values_is_refused(server: Live) -> None:
    status, answer, _ = server.post(prompt=[[]] * 40_000)
    assert (status, answer["error"]["code"]) == (413, "body_too_large")
    assert server.post(prompt="a" * 400 + "[" * 100, max_tokens=1)[0] == 200


@pytest.mark.parametrize("value", ["a" * 150, [1, [2, {"a": 3}]], {"a": 1}, None, 1.5, "\ud800"])
def test_small_values_are_shown_as_python_writes_them(value: Any) -> None:
    assert shown(value) == repr(value)[:100]


def test_only_the_beginning_of_a_large_value_is_written() -> None:
    class Far:
        def __repr__(self) -> str:
            raise AssertionError("nobody sees this one")

    assert shown([*range(90), Far()]).startswith("[0, 1, 2")
