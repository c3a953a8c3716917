"""Prompts become token ids as the client asks, and a long one does not hold up the server."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Sequence
from typing import Any

import aiohttp
import pytest
from live_server import live, post, with_client
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from slosched.engine.server import ByteTokenizer, HuggingFaceTokenizer
from slosched.engine.server.prompts import PromptEncoder
from slosched.engine.server.tokenizer import Message, TemplateOptions
from slosched.engine.torch.tiny import tiny_tokenizer

_DEFAULT = TemplateOptions()


class Slow(ByteTokenizer):
    """A tokenizer that takes as long as the test wants, and cannot tell lengths beforehand."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.gate = threading.Event()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        if len(text) > 10_000:
            self.entered.set()
            assert self.gate.wait(30)
        return super().encode(text, add_special_tokens=add_special_tokens)

    def fewest_tokens(self, text: str) -> int:
        return len(text) // 1000


def test_the_server_answers_others_while_it_encodes_a_long_prompt() -> None:
    slow = Slow()

    async def scenario(client: aiohttp.ClientSession) -> tuple[Any, Any]:
        long = asyncio.create_task(post(client, prompt="x" * 20_000))
        while not slow.entered.is_set():
            await asyncio.sleep(0.001)
        async with client.get("/health") as response:
            assert response.status == 200
        short = await post(client, prompt="abc", max_tokens=3)
        slow.gate.set()
        return short, await long

    with live(tokenizer=slow) as server:
        short, long = asyncio.run(with_client(server.url, scenario))
    assert short[1]["choices"][0]["text"] == "abc"
    assert (long[0], long[1]["error"]["code"]) == (400, "context_length_exceeded")


class Talkative(ByteTokenizer):
    """A tokenizer whose template writes all that it gets; it notes the thread that does so."""

    def __init__(self) -> None:
        self.thread: int | None = None

    def apply_chat_template(
        self, messages: Sequence[Message], options: TemplateOptions = _DEFAULT
    ) -> list[int]:
        self.thread = threading.get_ident()
        return self.encode(f"{messages}{options.tools}{options.values}")


@pytest.mark.parametrize(
    ("fields", "is_long"),
    [
        ({}, False),
        ({"tools": 1}, False),
        ({"tools": 5000}, True),
        ({"chat_template_kwargs": {"about": "x" * 5000}}, True),
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, True),
    ],
)
def test_whatever_makes_a_chat_long_is_encoded_in_another_thread(
    fields: dict[str, Any], is_long: bool
) -> None:
    tokenizer = Talkative()
    encoder = PromptEncoder(tokenizer, 100_000)
    body = {"messages": [{"role": "user", "content": "hi"}], **fields}
    if (num_chars := fields.get("tools")) is not None:
        function = {"name": "f", "description": "x" * num_chars}
        body["tools"] = [{"type": "function", "function": function}]
    [ids] = asyncio.run(encoder.encode_chat(body))
    assert (len(ids) > 5000) == is_long
    assert (tokenizer.thread != threading.get_ident()) == is_long


@pytest.mark.parametrize("prompt", ["x", [1]])
def test_others_get_their_turns_between_many_short_prompts(prompt: Any) -> None:
    encoder = PromptEncoder(ByteTokenizer(), 1000)
    body = {"prompt": [prompt] * 20}

    async def turns_beside(encoding: Awaitable[object]) -> int:
        task, num_turns = asyncio.ensure_future(encoding), 0
        while not task.done():
            await asyncio.sleep(0)
            num_turns += 1
        return num_turns

    async def play() -> list[int]:
        ids = await encoder.encode_prompts(body)
        return [
            await turns_beside(encoder.encode_prompts(body)),
            await turns_beside(encoder.texts_of({**body, "truncate_prompt_tokens": 5}, ids)),
        ]

    assert min(asyncio.run(play())) >= 20


@pytest.fixture
def tokenizer() -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer(tiny_tokenizer(), 259, frozenset({2}))


def test_a_text_has_at_least_as_many_tokens_as_its_bytes_make_longest_ones(
    tokenizer: HuggingFaceTokenizer,
) -> None:
    text = "wörter " * 100
    assert 50 < tokenizer.fewest_tokens(text) <= len(tokenizer.encode(text))


def test_special_tokens_are_shown_to_who_wants_them(tokenizer: HuggingFaceTokenizer) -> None:
    ids = [*tokenizer.encode("hi"), 2]
    assert tokenizer.decode(ids) == "hi"
    assert tokenizer.decode(ids, skip_special_tokens=False) == f"hi{tiny_tokenizer().eos_token}"


def test_the_template_gets_what_the_client_gives_it() -> None:
    own = tiny_tokenizer()
    own.chat_template = (
        "{% for m in messages %}{{ m.name }}: {{ m.content }}{% endfor %}"
        "{% if loud %}!{% endif %}{% if add_generation_prompt %}>{% endif %}"
    )
    tokenizer = HuggingFaceTokenizer(own, 259)
    messages = [{"role": "user", "content": "hi", "name": "Eve"}]

    def text(**options: Any) -> str:
        return tokenizer.decode(tokenizer.apply_chat_template(messages, TemplateOptions(**options)))

    assert text() == "Eve: hi>"
    assert text(add_generation_prompt=False) == "Eve: hi"
    assert text(values={"loud": True}) == "Eve: hi!>"
    assert text(add_generation_prompt=False, continue_final_message=True) == "Eve: hi"
    with pytest.raises(ValueError, match=r"may not set \['tokenize'\]"):
        text(values={"tokenize": True})


@pytest.mark.parametrize("prompt", ["in the beginning", "was the word"])
def test_an_answer_begins_with_the_space_behind_the_prompt(prompt: str) -> None:
    """The decoders of Llama 2 and Mistral drop a space that begins their text."""
    words = ["<unk>", *(f"▁{word}" for word in ("in", "the", "beginning", "was", "word"))]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.decoder = decoders.Metaspace()
    fast = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>")
    with live(tokenizer=HuggingFaceTokenizer(fast, len(words))) as server:
        body = {"prompt": prompt, "max_tokens": 3}
        _, plain, _ = server.post(**body)
        _, echoed, _ = server.post(**body, echo=True)
        events = server.events(**body)
    assert plain["choices"][0]["text"] == f" {prompt}"  # the device repeats the prompt
    assert echoed["choices"][0]["text"] == f"{prompt} {prompt}"
    assert "".join(event["choices"][0]["text"] for event in events) == f" {prompt}"


@pytest.mark.parametrize("n", [1, 2])
def test_an_answer_at_which_the_tokenizer_panics_is_an_error(n: int) -> None:
    """A panic of a library in Rust is no Exception, and with several answers nobody saw it."""
    words = ["<unk>", "in", " "]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "<unk>"))
    inner.decoder = decoders.Strip(" ", 1, 1)
    fast = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>")
    with live(tokenizer=HuggingFaceTokenizer(fast, len(words))) as server:
        for is_streaming in (False, True):
            body = {"prompt": [1, 2, 1], "max_tokens": 3, "n": n, "stream": is_streaming}
            status, answer, _ = server.post(**body)
            assert (status, answer["error"]["code"]) == (500, "engine_fault")
        assert server.post(prompt=[1, 1], max_tokens=2)[0] == 200
        assert server.num_held_blocks == 0
