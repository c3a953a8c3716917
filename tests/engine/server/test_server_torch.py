"""A transformers model with its own tokenizer, behind HTTP."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest
import tokenizers
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from live_server import live, post, stream, with_client
from tokenizers import decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from slosched.engine.server import (
    HuggingFaceTokenizer,
    NoTokenizer,
)
from slosched.engine.server.text import Detokenizer
from slosched.engine.torch import LoadedModel
from slosched.engine.torch.tiny import tiny_tokenizer


def generate(model: LoadedModel, ids: list[int], n: int, **options: Any) -> list[int]:
    with torch.inference_mode():
        out = model.model.generate(
            torch.tensor([ids]), max_new_tokens=n, min_new_tokens=n, do_sample=False, **options
        )
    return [int(i) for i in out[0, len(ids) :]]


def test_concurrent_requests_answer_as_generate_does(
    model: LoadedModel, tokenizer: HuggingFaceTokenizer, url: str
) -> None:
    prompts = ["one", "two words", "drei Wörter hier", "🙂" * 5]

    async def ask(client: Any) -> list[Any]:
        fields = {"max_tokens": 12, "min_tokens": 12, "temperature": 0}
        return await asyncio.gather(
            *[post(client, prompt=prompt, **fields) for prompt in prompts],
            *[stream(client, prompt=prompt, **fields) for prompt in prompts],
        )

    answers = asyncio.run(with_client(url, ask))
    torch.set_num_threads(1)
    expected = [
        tokenizer.decode(generate(plain(model), tokenizer.encode(prompt), 12)) for prompt in prompts
    ]
    assert [answer["choices"][0]["text"] for _, answer, _ in answers[:4]] == expected
    texts = ["".join(event["choices"][0]["text"] for event in events) for events in answers[4:]]
    assert texts == expected


def test_a_text_with_a_token_that_the_model_lacks_is_refused(model: LoadedModel) -> None:
    """A tokenizer may have more tokens than its model has embeddings."""
    larger, text = tiny_tokenizer(), "a<|new|>b"
    larger.add_special_tokens({"additional_special_tokens": ["<|new|>"]})

    async def ask(client: Any) -> list[Any]:
        chat = [{"role": "user", "content": text}]
        return [
            await post(client, prompt=text),
            await post(client, "/v1/chat/completions", messages=chat),
        ]

    with live(tokenizer=HuggingFaceTokenizer(larger, model.vocab_size)) as server:
        answers = asyncio.run(with_client(server.url, ask))
    for (status, answer, _), param in zip(answers, ("prompt", "messages"), strict=True):
        assert (status, answer["error"]["param"]) == (400, param)
        assert "the token id 259, but ids are in [0, 259)" in answer["error"]["message"]


def test_a_repetition_penalty_and_a_bias_are_those_of_transformers(
    model: LoadedModel, tokenizer: HuggingFaceTokenizer, url: str
) -> None:
    ids = tokenizer.encode("one two one two")
    fields = {"prompt": ids, "max_tokens": 12, "min_tokens": 12, "temperature": 0}
    bias = {7: 3.0, 9: -2.0}

    async def ask(client: Any) -> list[Any]:
        wishes = (
            {},
            {"repetition_penalty": 1.5},
            {"logit_bias": {str(t): b for t, b in bias.items()}},
        )
        return [await post(client, return_token_ids=True, **fields, **wish) for wish in wishes]

    answers = asyncio.run(with_client(url, ask))
    plain_ids, penalised, biased = (answer["choices"][0]["token_ids"] for _, answer, _ in answers)
    torch.set_num_threads(1)
    assert plain_ids == generate(plain(model), ids, 12)
    assert penalised == generate(plain(model), ids, 12, repetition_penalty=1.5) != plain_ids
    sequence_bias = {(token,): value for token, value in bias.items()}
    assert biased == generate(plain(model), ids, 12, sequence_bias=sequence_bias)


def test_a_prompt_that_comes_again_is_found_in_the_cache_by_who_knows_its_salt(url: str) -> None:
    async def ask(client: Any) -> Any:
        fields = {"prompt": "the same question, twice", "max_tokens": 5, "temperature": 0}
        salts = (None, None, "a secret", "a secret")
        answers = [await post(client, cache_salt=salt, **fields) for salt in salts]
        async with client.get("/metrics") as page:
            return answers, await page.text()

    answers, metrics = asyncio.run(with_client(url, ask))
    bodies = [body for _, body, _ in answers]
    assert len({body["choices"][0]["text"] for body in bodies}) == 1
    usages = [body["usage"] for body in bodies]
    cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]
    assert cached == [0, (usages[1]["prompt_tokens"] - 1) // 4 * 4] * 2
    hits = re.search(r"^vllm:prefix_cache_hits_total\S* (\d+)$", metrics, re.MULTILINE)
    assert hits is not None
    assert int(hits[1]) >= cached[1]


def plain(model: LoadedModel) -> LoadedModel:
    """Return a copy of the model with transformers' own attention, apart from the server's model."""
    from copy import deepcopy
    from dataclasses import replace

    twin = deepcopy(model.model)
    twin.set_attn_implementation("eager")
    return replace(model, model=twin)


def test_a_chat_goes_through_the_template(url: str) -> None:
    messages = [{"role": "user", "content": "hi"}]

    async def ask(client: Any) -> Any:
        return (
            await post(client, "/v1/chat/completions", messages=messages, max_tokens=3),
            await post(client, "/tokenize", messages=messages),
            await post(client, "/tokenize", prompt="hi"),
        )

    chat, ids, plain_ids = asyncio.run(with_client(url, ask))
    assert chat[0] == 200
    assert chat[1]["usage"]["prompt_tokens"] == ids[1]["count"] > plain_ids[1]["count"]


@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=80))
def test_pieces_of_a_real_decoder_join_to_its_text(
    tokenizer: HuggingFaceTokenizer, text: str
) -> None:
    ids = tokenizer.encode(text)
    detokenizer = Detokenizer(tokenizer.decode)
    pieces = [detokenizer.add(i) for i in ids]
    assert "".join(pieces) + detokenizer.flush() == tokenizer.decode(ids)
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


_WORDS = ["▁", "a", "b", "▁a", "▁ab", "ab", ",", "\n"]


@pytest.fixture(scope="module")
def byte_fallback() -> HuggingFaceTokenizer:
    """Return a tokenizer that writes what it does not know as bytes, as those of Gemma do."""
    vocabulary = {token: i for i, token in enumerate(["<unk>", *_WORDS])}
    vocabulary |= {f"<0x{byte:02X}>": len(vocabulary) + byte for byte in range(256)}
    merges = [("▁", "a"), ("a", "b"), ("▁a", "b")]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True)
    )
    backend.normalizer = normalizers.Replace(" ", "▁")
    spaces = decoders.Replace("▁", " ")
    first = decoders.Strip(" ", 1, 0)
    backend.decoder = decoders.Sequence([spaces, decoders.ByteFallback(), decoders.Fuse(), first])
    fast = PreTrainedTokenizerFast(tokenizer_object=backend)
    return HuggingFaceTokenizer(fast, len(vocabulary))


@given(prompt=st.text("a é日😀", max_size=8), answer=st.text("ab, \né日😀", max_size=60))
@example(prompt="a", answer="😀😀 a日本")
@example(prompt="😀😀", answer=" a")
def test_characters_of_several_tokens_may_follow_each_other(
    byte_fallback: HuggingFaceTokenizer, prompt: str, answer: str
) -> None:
    """The second of two emoji came as three U+FFFD, and a space behind two in a prompt was lost."""
    decode = byte_fallback.decode
    before, ids = byte_fallback.encode(prompt), byte_fallback.encode(answer)
    detokenizer = Detokenizer(decode, before)
    joined = "".join(map(detokenizer.add, ids)) + detokenizer.flush()
    assert joined == decode([*before, *ids])[len(decode(before)) :]


def test_without_a_tokenizer_prompts_are_token_ids() -> None:
    none = NoTokenizer(100)
    assert none.decode([1, 2]) == ""
    with pytest.raises(ValueError, match="token ids"):
        none.encode("text")
    with pytest.raises(ValueError, match="token ids"):
        none.apply_chat_template([{"role": "user", "content": "hi"}])
