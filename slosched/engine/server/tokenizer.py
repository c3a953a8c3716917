"""The tokenizer interface that the server needs, and its implementations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

Message = Mapping[str, str]
"""One chat message: its `role` and its `content`."""


class Tokenizer(Protocol):
    """Converts text to token ids and back."""

    @property
    def vocab_size(self) -> int:
        """Return the size of the vocabulary; ids are in [0, vocab_size)."""

    @property
    def end_token_ids(self) -> frozenset[int]:
        """Return the ids with which the model ends an output."""

    def encode(self, text: str, /) -> list[int]:
        """Return the ids of a prompt, with the special tokens that the model wants in front of it.

        Raises ValueError if the text cannot be encoded.
        """

    def decode(self, token_ids: Sequence[int], /) -> str:
        """Return the text without special tokens; bytes that are not UTF-8 become U+FFFD."""

    def apply_chat_template(self, messages: Sequence[Message], /) -> list[int]:
        """Return the ids of a conversation, up to where the assistant's answer begins.

        Raises ValueError if there is no template or it refuses the conversation.
        """


class ByteTokenizer:
    """A tokenizer with one token per UTF-8 byte, for emulated devices, which have no vocabulary."""

    vocab_size = 256
    end_token_ids: frozenset[int] = frozenset()

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8", errors="replace"))

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(token_ids).decode("utf-8", errors="replace")

    def apply_chat_template(self, messages: Sequence[Message]) -> list[int]:
        turns = "".join(f"{m['role']}: {m['content']}\n" for m in messages)
        return self.encode(f"{turns}assistant: ")


class NoTokenizer:
    """A stand-in for a missing tokenizer: prompts are token ids, and the answer's text is empty."""

    def __init__(self, vocab_size: int, end_token_ids: frozenset[int] = frozenset()) -> None:
        self.vocab_size = vocab_size
        self.end_token_ids = end_token_ids

    def encode(self, _text: str, /) -> list[int]:
        raise ValueError("this model has no tokenizer; send the prompt as a list of token ids")

    def decode(self, _token_ids: Sequence[int], /) -> str:
        return ""

    def apply_chat_template(self, _messages: Sequence[Message], /) -> list[int]:
        raise ValueError("this model has no tokenizer; send token ids to /v1/completions")


class HuggingFaceTokenizer:
    """A tokenizer of `transformers`, which this module does not import.

    `vocab_size` is the model's, since the tokenizer may know more or fewer ids than the model has
    embeddings.
    """

    def __init__(
        self, tokenizer: Any, vocab_size: int, end_token_ids: frozenset[int] = frozenset()
    ) -> None:
        self._tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.end_token_ids = end_token_ids

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text))

    def decode(self, token_ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(
            list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def apply_chat_template(self, messages: Sequence[Message]) -> list[int]:
        from jinja2 import TemplateError

        if self._tokenizer.chat_template is None:
            raise ValueError("this model has no chat template; send text to /v1/completions")
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
            )
        except TemplateError as error:
            raise ValueError(f"the model's chat template refuses the messages: {error}") from error
        # The template has already written the special tokens.
        return list(self._tokenizer.encode(text, add_special_tokens=False))
