"""What is told of the tokens of a prompt, in the forms of OpenAI's `echo` and vLLM's
`prompt_logprobs`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import chain
from typing import NamedTuple

from slosched.core import PromptLogprobs
from slosched.engine.server.logprobs import LEAST, Likely, Told, by_text
from slosched.engine.server.long_json import LongList
from slosched.engine.server.respond import Json
from slosched.engine.server.tokenizer import Tokenizer

_NUM_AT_A_TIME = 256
"""How many log-probabilities are written at a time, which takes about a millisecond, or four if no
token among them has been decoded before."""


class _Place(NamedTuple):
    """What is told of one place of a prompt."""

    token_id: int
    logprob: float
    rank: int
    likeliest: Sequence[tuple[int, float]]


class ToldPrompt:
    """The tokens of one prompt, and their log-probabilities if the engine told them."""

    def __init__(
        self, token_ids: Sequence[int], parts: Sequence[PromptLogprobs], tokenizer: Tokenizer
    ) -> None:
        """Raise RuntimeError if the parts are not those of all tokens behind the first one."""
        self._token_ids = token_ids
        self._parts = parts
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}
        """The texts of the tokens that have been decoded."""
        place = 1
        for part in parts:
            if part.first != place:
                raise RuntimeError(f"what is told of the prompt has a gap at token {place}")
            place += len(part.of_tokens)
        if place != len(token_ids):
            raise RuntimeError(f"{place} of the prompt's {len(token_ids)} tokens are told")

    @cached_property
    def num_chars(self) -> int:
        """Return the characters of all tokens, each decoded by itself.

        To be asked when these have been written, since to decode all at once takes long.
        """
        return sum(len(self._text(token_id)) for token_id in self._token_ids)

    def of_vllm(self, num_likeliest: int) -> LongList:
        """Return vLLM's `prompt_logprobs`: an object by token id for each token but the first."""
        items = chain([None], map(self._by_id, self._places(num_likeliest)))
        return LongList(items, 1 + _NUM_AT_A_TIME // (1 + num_likeliest))

    def of_echo(self, num_likeliest: int, answer: Sequence[Told]) -> Json:
        """Return the `logprobs` of a completion with the prompt in front of the answer."""
        texts = map(self._text, self._token_ids)
        own = (_finite(place.logprob) for place in self._places(0))
        likeliest = map(self._by_text, self._places(num_likeliest))
        few = 1 + _NUM_AT_A_TIME // (1 + num_likeliest)
        return {
            "tokens": LongList(chain(texts, (each.text for each in answer)), _NUM_AT_A_TIME),
            "token_logprobs": LongList(
                chain([None], own, (each.logprob for each in answer)), _NUM_AT_A_TIME
            ),
            "top_logprobs": LongList(chain([None], likeliest, map(by_text, answer)), few),
            "text_offset": LongList(self._offsets(answer), _NUM_AT_A_TIME),
        }

    def _offsets(self, answer: Sequence[Told]) -> Iterator[int]:
        offset = 0
        for text in chain(map(self._text, self._token_ids), (each.text for each in answer)):
            yield offset
            offset += len(text)

    def _places(self, num_likeliest: int) -> Iterator[_Place]:
        for part in self._parts:
            width, num = part.num_likeliest, min(num_likeliest, part.num_likeliest)
            for at, logprob in enumerate(part.of_tokens):
                begin = at * width
                ids = part.likeliest_ids[begin : begin + num]
                likeliest = list(zip(ids, part.likeliest[begin : begin + num], strict=True))
                token_id = self._token_ids[part.first + at]
                yield _Place(token_id, logprob, part.ranks[at], likeliest)

    def _by_id(self, place: _Place) -> Json:
        """Return the token itself and then the likeliest ones."""
        found = {str(place.token_id): self._entry(place.token_id, place.logprob, place.rank)}
        for rank, (token_id, logprob) in enumerate(place.likeliest, 1):
            found.setdefault(str(token_id), self._entry(token_id, logprob, rank))
        return dict(found)

    def _entry(self, token_id: int, logprob: float, rank: int) -> Json:
        return {"logprob": _finite(logprob), "rank": rank, "decoded_token": self._text(token_id)}

    def _by_text(self, place: _Place) -> dict[str, float]:
        likeliest = tuple(Likely(self._text(other), _finite(at)) for other, at in place.likeliest)
        return by_text(Told(self._text(place.token_id), _finite(place.logprob), likeliest))

    def _text(self, token_id: int) -> str:
        text = self._texts.get(token_id)
        if text is None:
            text = self._tokenizer.decode([token_id], skip_special_tokens=False)
            self._texts[token_id] = text
        return text


def _finite(logprob: float) -> float:
    """Return a number that JSON has; what is no number is taken for impossible, too."""
    return logprob if logprob > LEAST else LEAST
