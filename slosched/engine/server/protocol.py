"""Parsing and checks of the bodies that clients send to the two generation endpoints.

Unknown fields are ignored, as in other servers.  Known fields that would change the answer and are
not implemented are refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from slosched.core import SamplingParams
from slosched.engine.server.errors import ApiError
from slosched.engine.server.tokenizer import Message
from slosched.workload.http_slo import BEST_EFFORT_FIELD

Body = Mapping[str, object]

_UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "prompt_logprobs": (),
    "echo": (False,),
    "suffix": ("",),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "tools": ([],),
    "functions": ([],),
    "response_format": ({"type": "text"},),
    "use_beam_search": (False,),
}
"""Fields that are refused unless null or equal to a listed value, which changes nothing."""

_MAX_STOPS = 16
_MAX_STOP_TOKEN_IDS = 128
_MAX_TEMPERATURE = 100.0
"""At this temperature all tokens are as likely as each other, but for a few percent."""
_MIN_SEED, _MAX_SEED = -(2**63), 2**64 - 1
_MIN_PRIORITY, _MAX_PRIORITY = -(2**31), 2**31 - 1


@dataclass(frozen=True, slots=True)
class Options:
    """The settings of a generation, apart from its prompt."""

    max_tokens: int | None
    """None if the client set no limit."""
    sampling: SamplingParams
    stops: tuple[str, ...]
    priority: int
    cache_salt: str | None
    is_streaming: bool
    include_usage: bool
    takes_best_effort: bool


def parse_options(body: Body, default_temperature: float, vocab_size: int) -> Options:
    """Return a body's options; raise ApiError (400) that names a wrong field and its value."""
    for name, neutral in _UNSUPPORTED.items():
        value = body.get(name)
        if value is not None and not any(_is_same(value, other) for other in neutral):
            raise ApiError(400, f"{name}={value!r:.100} is not supported; leave it out", param=name)
    stream_options = body.get("stream_options") or {}
    if not isinstance(stream_options, Mapping):
        raise _wrong("stream_options", stream_options, "an object")
    return Options(
        max_tokens=_max_tokens(body),
        sampling=SamplingParams(
            temperature=_number(body, "temperature", default_temperature, 0, _MAX_TEMPERATURE),
            top_p=_number(body, "top_p", 1.0, 0, 1),
            top_k=max(_integer(body, "top_k", 0, -1), 0),
            seed=_seed(body),
            ignore_eos=_flag(body, "ignore_eos"),
            min_tokens=_integer(body, "min_tokens", 0, 0),
            stop_token_ids=_stop_token_ids(body, vocab_size),
        ),
        stops=_stops(body),
        priority=_integer(body, "priority", 0, _MIN_PRIORITY, _MAX_PRIORITY),
        cache_salt=_cache_salt(body),
        is_streaming=_flag(body, "stream"),
        include_usage=_flag(stream_options, "include_usage"),
        takes_best_effort=_flag(body, BEST_EFFORT_FIELD),
    )


def parse_prompt(body: Body, vocab_size: int) -> str | list[int]:
    """Return the prompt as text or token ids; a list with one prompt counts as that prompt."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, list) or not all(type(i) is int for i in prompt):
        raise _wrong("prompt", prompt, "one string or one list of token ids")
    return _token_ids("prompt", prompt, vocab_size)


def parse_messages(body: Body) -> list[Message]:
    """Return role and content of each message; text parts of a list are joined by line breaks."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise _wrong("messages", messages, "a list of at least one message")
    return [_message(i, message) for i, message in enumerate(messages)]


def _message(i: int, message: object) -> Message:
    where = f"messages[{i}]"
    if not isinstance(message, Mapping):
        raise _wrong(where, message, "an object with role and content")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise _wrong(f"{where}.role", role, "a string such as 'user'")
    if content is None:
        content = ""
    if isinstance(content, list):
        content = "\n".join(_part(f"{where}.content[{j}]", part) for j, part in enumerate(content))
    if not isinstance(content, str):
        raise _wrong(f"{where}.content", content, "a string or a list of text parts")
    return {"role": role, "content": content}


def _part(where: str, part: object) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text":
        text = part.get("text")
        if isinstance(text, str):
            return text
    raise _wrong(where, part, 'a part {"type": "text", "text": "…"}')


def _max_tokens(body: Body) -> int | None:
    for name in ("max_completion_tokens", "max_tokens"):
        if body.get(name) is not None:
            return _integer(body, name, 1, 1)
    return None


def _stops(body: Body) -> tuple[str, ...]:
    stops = body.get("stop")
    if stops is None:
        return ()
    if isinstance(stops, str):
        stops = [stops]
    if (
        not isinstance(stops, list)
        or len(stops) > _MAX_STOPS
        or not all(isinstance(stop, str) and stop for stop in stops)
    ):
        raise _wrong("stop", stops, f"a string or at most {_MAX_STOPS} strings, none of them empty")
    return tuple(stops)


def _stop_token_ids(body: Body, vocab_size: int) -> tuple[int, ...]:
    ids = body.get("stop_token_ids")
    if ids is None:
        return ()
    if (
        not isinstance(ids, list)
        or len(ids) > _MAX_STOP_TOKEN_IDS
        or not all(type(i) is int for i in ids)
    ):
        raise _wrong("stop_token_ids", ids, f"a list of at most {_MAX_STOP_TOKEN_IDS} token ids")
    return tuple(_token_ids("stop_token_ids", ids, vocab_size))


def _token_ids(name: str, ids: list[int], vocab_size: int) -> list[int]:
    """Return `ids`; raise ApiError (400) if one of them is outside the vocabulary."""
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        bad = next(i for i in ids if not 0 <= i < vocab_size)
        raise ApiError(
            400, f"{name} has the token id {bad}, but ids are in [0, {vocab_size})", param=name
        )
    return ids


def _seed(body: Body) -> int | None:
    if body.get("seed") is None:
        return None
    return _integer(body, "seed", 0, _MIN_SEED, _MAX_SEED)


def _cache_salt(body: Body) -> str | None:
    salt = body.get("cache_salt")
    if salt is None or (isinstance(salt, str) and salt):
        return salt
    raise _wrong("cache_salt", salt, "a string that is not empty")


def _integer(body: Body, name: str, default: int, low: int, high: float = math.inf) -> int:
    value = body.get(name)
    if value is None:
        return default
    if type(value) is not int or not low <= value <= high:
        bounds = f">= {low}" if high == math.inf else f"in [{low}, {high}]"
        raise _wrong(name, value, f"an integer {bounds}")
    return value


def _number(body: Body, name: str, default: float, low: float, high: float) -> float:
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise _wrong(name, value, f"a number in [{low:g}, {high:g}]")
    return float(value)


def _flag(body: Body, name: str) -> bool:
    value = body.get(name)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise _wrong(name, value, "true or false")
    return value


def _is_same(value: object, other: object) -> bool:
    """Compare two values without taking true for 1."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def _wrong(name: str, value: object, expected: str) -> ApiError:
    if value is None:
        return ApiError(400, f"{name} is missing; it must be {expected}", param=name)
    return ApiError(400, f"{name} must be {expected}, not {value!r:.100}", param=name)
