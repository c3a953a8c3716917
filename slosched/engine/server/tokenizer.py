"""The tokenizer interface that the server needs, and its implementations."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, ParamSpec, Protocol, TypeVar

from slosched.engine.server.call_form import CLOSING, OPENING, CallForm, form_of

P = ParamSpec("P")
T = TypeVar("T")

Message = Mapping[str, object]
"""One chat message: its `role`, its `content`, and what else its template may know."""

_PRINTED = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS = tuple(byte for byte in range(0x100) if byte not in _PRINTED)
_BYTE_LEVEL = {chr(byte): byte for byte in _PRINTED} | {
    chr(0x100 + i): byte for i, byte in enumerate(_OTHERS)
}
"""The bytes for which the characters of byte-level tokens stand (GPT-2's `bytes_to_unicode`)."""
_SINGLE_BYTE = re.compile("<0x([0-9A-F]{2})>")
"""The token of a byte, in a vocabulary that has them besides its tokens of text."""


@dataclass(frozen=True, slots=True)
class TemplateOptions:
    """The settings by which a conversation becomes a prompt."""

    add_generation_prompt: bool = True
    """Whether the prompt goes on to where the assistant's answer begins."""
    continue_final_message: bool = False
    """Whether the last message is left open, so that the answer continues it."""
    add_special_tokens: bool = False
    """Whether special tokens are added to those that the template writes."""
    values: Mapping[str, object] = field(default_factory=dict)
    """Further values for the template."""
    tools: Sequence[Mapping[str, object]] = ()
    """The functions that the answer may call, as OpenAI's API has them."""


class Tokenizer(Protocol):
    """Converts text to token ids and back."""

    @property
    def vocab_size(self) -> int:
        """Return the size of the vocabulary; ids are in [0, vocab_size)."""

    @property
    def end_token_ids(self) -> frozenset[int]:
        """Return the ids with which the model ends an output."""

    def encode(self, text: str, /, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a prompt, with the special tokens that the model wants in front of it.

        Raises ValueError if the text cannot be encoded.
        """

    def fewest_tokens(self, text: str, /) -> int:
        """Return a number of tokens that a text has at least, without encoding it."""

    def decode(self, token_ids: Sequence[int], /, *, skip_special_tokens: bool = True) -> str:
        """Return the text; bytes that are not UTF-8 become U+FFFD."""

    def bytes_of(self, token_id: int, /) -> bytes | None:
        """Return the bytes of a token that is a part of a character; None if they are not known."""

    def apply_chat_template(
        self, messages: Sequence[Message], options: TemplateOptions = ..., /
    ) -> list[int]:
        """Return the ids of a conversation.

        Raises ValueError if there is no template or it refuses the conversation.
        """

    @property
    def call_form(self) -> CallForm | None:
        """Return how the model writes calls among its text; None if that is not known."""


_DEFAULT = TemplateOptions()


class ByteTokenizer:
    """A tokenizer with one token per UTF-8 byte, for emulated devices, which have no vocabulary."""

    vocab_size = 256
    end_token_ids: frozenset[int] = frozenset()
    call_form: CallForm | None = None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:  # noqa: ARG002
        return list(text.encode("utf-8", errors="replace"))

    def fewest_tokens(self, text: str) -> int:
        return len(text)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:  # noqa: ARG002
        return bytes(token_ids).decode("utf-8", errors="replace")

    def bytes_of(self, token_id: int) -> bytes | None:
        return bytes([token_id])

    def apply_chat_template(
        self, messages: Sequence[Message], options: TemplateOptions = _DEFAULT
    ) -> list[int]:
        if options.values:
            raise ValueError(
                f"this template has no values {sorted(options.values)}; leave out "
                "chat_template_kwargs"
            )
        turns = "".join(f"{m['role']}: {m['content']}\n" for m in messages)
        if options.continue_final_message:
            turns = turns.removesuffix("\n")
        return self.encode(f"{turns}assistant: " if options.add_generation_prompt else turns)


class NoTokenizer:
    """A stand-in for a missing tokenizer: prompts are token ids, and the answer's text is empty."""

    call_form: CallForm | None = None

    def __init__(self, vocab_size: int, end_token_ids: frozenset[int] = frozenset()) -> None:
        self.vocab_size = vocab_size
        self.end_token_ids = end_token_ids

    def encode(self, _text: str, /, *, add_special_tokens: bool = True) -> list[int]:  # noqa: ARG002
        raise ValueError("this model has no tokenizer; send the prompt as a list of token ids")

    def fewest_tokens(self, _text: str, /) -> int:
        return 0

    def decode(self, _token_ids: Sequence[int], /, *, skip_special_tokens: bool = True) -> str:  # noqa: ARG002
        return ""

    def bytes_of(self, _token_id: int, /) -> bytes | None:
        return None

    def apply_chat_template(
        self, _messages: Sequence[Message], _options: TemplateOptions = _DEFAULT, /
    ) -> list[int]:
        raise ValueError("this model has no tokenizer; send token ids to /v1/completions")


def _without_panics(method: Callable[P, T]) -> Callable[P, T]:
    """Raise RuntimeError where the library in Rust panics: its panics are no Exceptions."""

    @wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return method(*args, **kwargs)
        except BaseException as error:
            if type(error).__name__ != "PanicException":
                raise
            raise RuntimeError(f"the tokenizer panicked: {error}") from error

    return call


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
        self._longest_token_bytes = _longest_token_bytes(tokenizer)
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        """The tokenizer in Rust, if there is one."""
        if self._backend is not None:
            self._backend.no_truncation()
            self._backend.no_padding()
        # Now, since the first use of a template takes a tenth of a second.
        self.call_form = self._found_call_form()

    @_without_panics
    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        if self._backend is None:
            return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))
        # Without offsets of characters; other threads run meanwhile.
        [encoding] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return list(encoding.ids)

    def fewest_tokens(self, text: str) -> int:
        if self._longest_token_bytes is None:
            return 0
        return len(text.encode()) // self._longest_token_bytes

    @_without_panics
    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        text: str = self._tokenizer.decode(
            list(token_ids),
            skip_special_tokens=skip_special_tokens,
            clean_up_tokenization_spaces=False,
        )
        return text

    def bytes_of(self, token_id: int) -> bytes | None:
        name: str = self._tokenizer.convert_ids_to_tokens(token_id)
        if (single := _SINGLE_BYTE.fullmatch(name)) is not None:
            return bytes.fromhex(single[1])
        is_byte_level = self._backend is not None and "ByteLevel" in str(self._backend.decoder)
        if is_byte_level and _BYTE_LEVEL.keys() >= set(name):
            return bytes(_BYTE_LEVEL[character] for character in name)
        return None

    def apply_chat_template(
        self, messages: Sequence[Message], options: TemplateOptions = _DEFAULT
    ) -> list[int]:
        from jinja2 import TemplateError

        if self._tokenizer.chat_template is None:
            raise ValueError("this model has no chat template; send text to /v1/completions")
        own = inspect.signature(self._tokenizer.apply_chat_template).parameters
        if taken := sorted(own.keys() & options.values.keys()):
            raise ValueError(f"chat_template_kwargs may not set {taken}")
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=options.add_generation_prompt,
                continue_final_message=options.continue_final_message,
                tools=list(options.tools) or None,
                **options.values,
            )
        except (TemplateError, TypeError) as error:
            raise ValueError(f"the model's chat template refuses the messages: {error}") from error
        return self.encode(text, add_special_tokens=options.add_special_tokens)

    def _found_call_form(self) -> CallForm | None:
        if self._tokenizer.chat_template is None:
            return None

        def render(messages: Sequence[Message], tools: Sequence[Message]) -> str:
            text: str = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages], tools=list(tools), tokenize=False
            )
            return text

        if (form := form_of(render)) is None:
            return None
        shown = self.decode(self.encode(OPENING + CLOSING, add_special_tokens=False))
        return form._replace(is_special=not (OPENING in shown and CLOSING in shown))


def _longest_token_bytes(tokenizer: Any) -> int | None:
    """Return the most bytes that a token stands for; None if a text may lose bytes on its way.

    That is known of byte-level tokenizers alone, whose tokens have a character for each byte.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or backend.normalizer is not None:
        return None
    steps = str(backend.pre_tokenizer)
    if "ByteLevel" not in steps or "Removed" in steps:
        return None
    added = tokenizer.added_tokens_decoder.values()
    if any(token.lstrip or token.rstrip for token in added):
        return None
    return max(len(token.encode()) for token in tokenizer.get_vocab())
