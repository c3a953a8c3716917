"""Prompts and messages to token ids, without holding up the event loop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from slosched.engine.server.errors import ApiError, too_long
from slosched.engine.server.messages import parse_messages, text_of
from slosched.engine.server.protocol import (
    PromptOptions,
    parse_prompt_options,
    parse_prompts,
)
from slosched.engine.server.tokenizer import Tokenizer
from slosched.engine.server.values import Body, check_vocabulary, flag

_MAX_INLINE_CHARS = 4096
"""Up to here encoding takes less time than another thread takes to wake up and answer."""


_CHARS_PER_TOKEN = 4


class PromptEncoder:
    """Encodes prompts for a model that holds `max_model_len` tokens of prompt and output."""

    def __init__(self, tokenizer: Tokenizer, max_model_len: int) -> None:
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        # One thread: a tokenizer is not made to be used by several at once.
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="slosched-tokenizer")

    async def encode_prompts(self, body: Body, num_output_tokens: int = 1) -> list[list[int]]:
        """Return the ids of each prompt of a completion; raise ApiError (400) if one is wrong."""
        options = parse_prompt_options(body, is_chat=False)
        prompts = parse_prompts(body, self._tokenizer.vocab_size)
        encoded = []
        for prompt in prompts:
            encoded.append(await self._encode_prompt(prompt, options, num_output_tokens))
            if len(prompts) > 1:  # many short ones take as long as a long one: others in between
                await asyncio.sleep(0)
        return encoded

    async def _encode_prompt(
        self, prompt: str | list[int], options: PromptOptions, num_output_tokens: int
    ) -> list[int]:
        if isinstance(prompt, str):
            encode = partial(
                self._tokenizer.encode, prompt, add_special_tokens=options.add_special_tokens
            )
            prompt = await self._encode(encode, [prompt], len(prompt), "prompt", options)
        if not prompt:
            raise ApiError(400, "the prompt is empty: it needs at least one token", param="prompt")
        return self._truncated(prompt, options, num_output_tokens)

    async def texts_of(self, body: Body, prompts: Sequence[Sequence[int]]) -> list[str]:
        """Return the texts of a completion's encoded prompts, as the client wrote them if it did.

        Of a prompt that was cut off it is the text of what is left.
        """
        options = parse_prompt_options(body, is_chat=False)
        skips_special_tokens = flag(body, "skip_special_tokens", default=True)
        texts = []
        for said, ids in zip(parse_prompts(body, self._tokenizer.vocab_size), prompts, strict=True):
            if isinstance(said, str) and options.truncate_tokens is None:
                texts.append(said)
                continue
            decode = partial(self._tokenizer.decode, ids, skip_special_tokens=skips_special_tokens)
            is_short = len(ids) * _CHARS_PER_TOKEN <= _MAX_INLINE_CHARS
            loop = asyncio.get_running_loop()
            texts.append(decode() if is_short else await loop.run_in_executor(self._pool, decode))
            await asyncio.sleep(0)  # there may be many short ones
        return texts

    async def encode_chat(self, body: Body, num_output_tokens: int = 1) -> list[list[int]]:
        """Return a list with the ids of a conversation; raise ApiError (400) if it is wrong."""
        options = parse_prompt_options(body, is_chat=True)
        messages = parse_messages(body)
        encode = partial(self._tokenizer.apply_chat_template, messages, options.template)
        texts = [text_of(message) for message in messages]
        # What a template may write besides; it need not write all of it.
        others = json.dumps([*options.template.tools, options.template.values])
        num_chars = sum(map(len, texts)) + len(others)
        ids = await self._encode(encode, texts, num_chars, "messages", options)
        if not ids:
            raise ApiError(400, "the conversation has no tokens", param="messages")
        return [self._truncated(ids, options, num_output_tokens)]

    async def _encode(
        self,
        encode: Callable[[], list[int]],
        texts: list[str],
        num_chars: int,
        param: str,
        options: PromptOptions,
    ) -> list[int]:
        """Return the ids; raise ApiError (400) if a text is not tokenizable or too long.

        `encode` writes at most `num_chars`, and all `texts`.  Texts that are surely too long are
        refused without encoding them.
        """
        try:
            fewest = sum(self._tokenizer.fewest_tokens(text) for text in texts)
            if fewest >= self._max_model_len and options.truncate_tokens is None:
                raise too_long(fewest, 1, self._max_model_len, is_estimate=True)
            if num_chars <= _MAX_INLINE_CHARS:
                ids = encode()
            else:
                ids = await asyncio.get_running_loop().run_in_executor(self._pool, encode)
        except ValueError as error:
            raise ApiError(400, f"{param} cannot be tokenized: {error}", param=param) from error
        # A tokenizer may have more tokens than its model, for which there are no embeddings.
        check_vocabulary(param, ids, self._tokenizer.vocab_size)
        return ids

    def _truncated(
        self, ids: list[int], options: PromptOptions, num_output_tokens: int
    ) -> list[int]:
        """Return the last tokens, as many as the client wants to keep."""
        keep = options.truncate_tokens
        if keep is None:
            return ids
        if keep == -1:
            keep = max(1, self._max_model_len - num_output_tokens)
        return ids[-keep:]
