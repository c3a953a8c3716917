"""Log-probabilities as OpenAI's endpoints write them.

Sources: OpenAI's API reference, and vLLM 0.32's `CompletionLogProbs` and `ChatCompletionLogProbs`
for what the reference leaves open.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

from slosched.core import TokenLogprobs
from slosched.engine.server.errors import ApiError
from slosched.engine.server.tokenizer import Tokenizer
from slosched.engine.server.values import Body, flag, integer, wrong

Json = dict[str, object]

MOST_LIKELIEST = 20
_WRITTEN: WeakKeyDictionary[Tokenizer, dict[int, tuple[str, bytes | None]]] = WeakKeyDictionary()
"""The texts and bytes of single tokens, of which 128 answers ask for 2,688 in a step."""
LEAST = -9999.0
"""What is told of a token that the model takes for impossible, since JSON has no infinity."""


def parse_num_logprobs(body: Body) -> int | None:
    """Return how many of the likeliest tokens are told at each place; None if nothing is told.

    A chat asks for them with `logprobs` and `top_logprobs`, a completion with the number alone.
    Raises ApiError (400) that names a wrong field.
    """
    if "messages" not in body:
        if isinstance(body.get("logprobs"), bool):
            if body["logprobs"]:
                raise wrong("logprobs", True, f"an integer in [0, {MOST_LIKELIEST}]")
            return None
        num = integer(body, "logprobs", -1, 0, MOST_LIKELIEST)
        return None if num < 0 else num
    num = integer(body, "top_logprobs", 0, 0, MOST_LIKELIEST)
    if flag(body, "logprobs"):
        return num
    if num:
        raise ApiError(
            400, f"top_logprobs={num} needs logprobs=true beside it", param="top_logprobs"
        )
    return None


def parse_num_prompt_logprobs(body: Body) -> int | None:
    """Return the same for the tokens of the prompt (`prompt_logprobs`, which is vLLM's).

    Raises ApiError (400) for a wrong number, and for a stream, which as in vLLM has no place for
    them; with `echo` it has.
    """
    num = integer(body, "prompt_logprobs", -1, 0, MOST_LIKELIEST)
    if num >= 0 and flag(body, "stream"):
        raise ApiError(
            400,
            "prompt_logprobs are not in streams: leave out stream, or send echo=true with logprobs "
            "to /v1/completions",
            param="prompt_logprobs",
        )
    return None if num < 0 else num


class Likely(NamedTuple):
    """A token that is likely at its place."""

    text: str
    logprob: float
    utf8: bytes | None = None
    """Its bytes, which may be a part of a character; None if they are not known."""


class Told(NamedTuple):
    """What is told of one token of an answer."""

    text: str
    logprob: float
    likeliest: tuple[Likely, ...]
    """The likeliest tokens at its place, the likeliest first."""
    utf8: bytes | None = None
    """Its bytes, as those of the likeliest."""


def tell(token_id: int, logprobs: TokenLogprobs, tokenizer: Tokenizer) -> Told:
    """Return what is told of one token."""
    text, utf8 = _written(token_id, tokenizer)
    likeliest = []
    for other, at in logprobs.likeliest:
        other_text, other_utf8 = _written(other, tokenizer)
        likeliest.append(Likely(other_text, max(at, LEAST), other_utf8))
    return Told(text, max(logprobs.drawn, LEAST), tuple(likeliest), utf8)


def _written(token_id: int, tokenizer: Tokenizer) -> tuple[str, bytes | None]:
    """Return the text and the bytes of one token, which is decoded once."""
    known = _WRITTEN.get(tokenizer)
    if known is None:
        known = _WRITTEN[tokenizer] = {}
    written = known.get(token_id)
    if written is None:
        text = tokenizer.decode([token_id], skip_special_tokens=False)
        is_whole = "\ufffd" not in text
        utf8 = text.encode("utf-8", "replace") if is_whole else tokenizer.bytes_of(token_id)
        written = known[token_id] = (text, utf8)
    return written


def of_completion(tokens: Sequence[Told], offset: int) -> Json:
    """Return the object of a completion, whose first token begins `offset` characters behind."""
    offsets = []
    for each in tokens:
        offsets.append(offset)
        offset += len(each.text)
    return {
        "tokens": [each.text for each in tokens],
        "token_logprobs": [each.logprob for each in tokens],
        "top_logprobs": list(map(by_text, tokens)),
        "text_offset": offsets,
    }


def by_text(token: Told) -> dict[str, float]:
    """Return the likeliest texts and the drawn one; of tokens that look alike the likeliest counts.

    Tokens that are parts of a character do.
    """
    by_text: dict[str, float] = {}
    for each in token.likeliest:
        by_text.setdefault(each.text, each.logprob)
    by_text.setdefault(token.text, token.logprob)
    return by_text


def of_chat(tokens: Sequence[Told], _offset: int) -> Json:
    """Return the object of a chat."""
    return {"content": entries(tokens)}


def entries(tokens: Sequence[Told]) -> list[Json]:
    """Return an entry for each token, as chats and /v1/responses have them."""
    return [
        {
            **_entry(each),
            "top_logprobs": list(map(_entry, each.likeliest)),
        }
        for each in tokens
    ]


def _entry(token: Told | Likely) -> Json:
    utf8 = None if token.utf8 is None else list(token.utf8)
    return {"token": token.text, "logprob": token.logprob, "bytes": utf8}
