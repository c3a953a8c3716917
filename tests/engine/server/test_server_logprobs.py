"""Log-probabilities in answers: those of the model, in the form of OpenAI's endpoints."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import openai
import pytest
import tokenizers
import torch
from live_server import post, stream, with_client
from openai.types.chat import ChatCompletion
from openai.types.completion import Completion
from tokenizers import decoders, models
from transformers import PreTrainedTokenizerFast

from slosched.core import TokenLogprobs
from slosched.engine.server import ByteTokenizer, HuggingFaceTokenizer
from slosched.engine.server.logprobs import tell
from slosched.engine.torch import LoadedModel

PROMPT = [5, 6, 7, 8]
NUM_TOKENS = 6
FIELDS = {"max_tokens": NUM_TOKENS, "min_tokens": NUM_TOKENS, "temperature": 0, "seed": 1}


def ask(url: str, path: str, *bodies: dict[str, Any]) -> list[tuple[int, Any, Any]]:
    async def use(client: Any) -> list[tuple[int, Any, Any]]:
        return [await post(client, path, **FIELDS, **body) for body in bodies]

    return asyncio.run(with_client(url, use))


@torch.inference_mode()
def odds(model: LoadedModel, ids: list[int]) -> torch.Tensor:
    """Return the log-probabilities of the token after each of the ids, with eager attention."""
    twin = deepcopy(model.model)
    twin.set_attn_implementation("eager")
    return twin(torch.tensor([ids])).logits[0].float().log_softmax(dim=-1)


def test_a_completion_has_the_log_probabilities_of_its_tokens_and_of_the_likeliest(
    url: str, model: LoadedModel, tokenizer: HuggingFaceTokenizer
) -> None:
    body = {"prompt": PROMPT, "logprobs": 3, "return_token_ids": True}
    [(status, answer, _), (_, twice, _)] = ask(url, "/v1/completions", body, {**body, "n": 2})
    assert status == 200
    Completion.model_validate(answer)
    [choice] = answer["choices"]
    ids, told = choice["token_ids"], choice["logprobs"]
    expected = odds(model, [*PROMPT, *ids])[len(PROMPT) - 1 : -1]
    assert told["tokens"] == [tokenizer.decode([i], skip_special_tokens=False) for i in ids]
    assert told["token_logprobs"] == pytest.approx(
        [float(row[i]) for row, i in zip(expected, ids, strict=True)], abs=1e-3
    )
    for row, likeliest in zip(expected, told["top_logprobs"], strict=True):
        best: dict[str, float] = {}
        for value, i in zip(*(part.tolist() for part in row.topk(3)), strict=True):
            best.setdefault(tokenizer.decode([i], skip_special_tokens=False), value)
        assert likeliest == pytest.approx(best, abs=1e-3), "parts of characters look alike"
    lengths = [len(text) for text in told["tokens"]]
    assert told["text_offset"] == [sum(lengths[:i]) for i in range(NUM_TOKENS)]
    assert [each["logprobs"] for each in twice["choices"]] == [told, told]


def test_a_stream_tells_the_same_as_the_whole_answer(url: str) -> None:
    async def use(client: Any) -> tuple[Any, list[Any]]:
        body = {**FIELDS, "prompt": PROMPT, "logprobs": 2}
        _, whole, _ = await post(client, **body)
        return whole, await stream(client, **body)

    whole, events = asyncio.run(with_client(url, use))
    told = whole["choices"][0]["logprobs"]
    parts = [event["choices"][0]["logprobs"] for event in events]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [each for part in parts for each in part[name]] == told[name], name


def test_a_chat_has_them_in_its_own_form(url: str) -> None:
    messages = [{"role": "user", "content": "hi"}]
    bodies = (
        {"messages": messages, "logprobs": True, "top_logprobs": 2},
        {"messages": messages, "logprobs": True},
        {"messages": messages, "logprobs": False},
    )
    answers = [answer for _, answer, _ in ask(url, "/v1/chat/completions", *bodies)]
    for answer in answers:
        ChatCompletion.model_validate(answer)
    two, none, nothing = (answer["choices"][0]["logprobs"] for answer in answers)
    assert nothing is None
    assert len(two["content"]) == NUM_TOKENS
    for entry, alone in zip(two["content"], none["content"], strict=True):
        likeliest = entry["top_logprobs"]
        assert [likeliest[0][key] for key in ("token", "logprob")] == [
            entry["token"],
            entry["logprob"],
        ], "greedy"
        assert likeliest[0]["logprob"] >= likeliest[1]["logprob"]
        assert bytes(entry["bytes"]).decode(errors="replace") == entry["token"]
        assert alone == {**entry, "top_logprobs": []}


def test_a_part_of_a_character_has_its_own_bytes(url: str, tokenizer: HuggingFaceTokenizer) -> None:
    """Clients join them to characters; they all had those of U+FFFD."""
    ids = tokenizer.encode("é😀")
    assert len(ids) == 6, "a token for each byte"
    body = {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 20}
    entries = []
    for token_id in ids:
        [(_, answer, _)] = ask(
            url, "/v1/chat/completions", {**body, "allowed_token_ids": [token_id]}
        )
        content = answer["choices"][0]["logprobs"]["content"]
        assert all(each["bytes"] == content[0]["bytes"] for each in content)
        entries.append(content[0])
    assert [each["token"] for each in entries] == ["\ufffd"] * 6
    assert bytes(byte for each in entries for byte in each["bytes"]).decode() == "é😀"
    likeliest = [each for entry in entries for each in entry["top_logprobs"]]
    parts = [each["bytes"] for each in likeliest if each["token"] == "\ufffd"]
    assert parts
    assert all(len(each) == 1 and each[0] >= 0x80 for each in parts)


def test_a_vocabulary_with_tokens_of_single_bytes_tells_them() -> None:
    vocabulary = {"a": 0, "<0xC3>": 1, "<0xA9>": 2, "[UNK]": 3}
    model = models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="[UNK]")
    backend = tokenizers.Tokenizer(model)
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    fast = PreTrainedTokenizerFast(tokenizer_object=backend)
    tokenizer = HuggingFaceTokenizer(fast, len(vocabulary))
    ids = tokenizer.encode("aé")
    assert ids == [0, 1, 2]
    told = [tell(each, TokenLogprobs(-1.0, ()), tokenizer) for each in ids]
    assert [each.utf8 for each in told] == [b"a", b"\xc3", b"\xa9"]


def test_they_are_those_of_the_model_and_not_of_what_a_bias_made_of_it(url: str) -> None:
    [(status, answer, _)] = ask(
        url, "/v1/completions", {"prompt": PROMPT, "logprobs": 0, "logit_bias": {"9": 100}}
    )
    assert status == 200
    told = answer["choices"][0]["logprobs"]
    assert all(-100 < value < 0 for value in told["token_logprobs"])
    assert [[*each] for each in told["top_logprobs"]] == [[token] for token in told["tokens"]]


def test_a_response_has_those_of_chats_whole_and_as_events(url: str) -> None:
    messages = [{"role": "user", "content": "hi"}]
    chat = {"messages": messages, "logprobs": True, "top_logprobs": 2, "return_token_ids": True}
    [(_, expected, _)] = ask(url, "/v1/chat/completions", chat)
    content = expected["choices"][0]["logprobs"]["content"]
    asked: dict[str, Any] = {"model": "tiny", "input": "hi", "max_output_tokens": NUM_TOKENS}
    asked |= {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "temperature": 0}
    asked["extra_body"] = {"min_tokens": NUM_TOKENS, "seed": 1}
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        whole = client.responses.create(**asked)
        events = list(client.responses.create(**asked, stream=True))
        plain = client.responses.create(**{**asked, "include": [], "top_logprobs": 0})
    [part] = whole.output[0].content  # type: ignore[union-attr]
    assert [each.model_dump() for each in part.logprobs] == content  # type: ignore[union-attr]
    assert whole.top_logprobs == 2
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    done = [event for event in events if event.type == "response.output_text.done"]
    assert [each.token for each in done[0].logprobs] == [each["token"] for each in content]
    streamed = [each.token for delta in deltas for each in delta.logprobs]
    assert streamed == [each["token"] for each in content][: len(streamed)]
    assert streamed
    assert plain.output[0].content[0].logprobs == []  # type: ignore[union-attr]


def test_a_response_obeys_biases_and_penalties_as_a_chat_does(url: str) -> None:
    bias = {"logit_bias": {"70": 20, "71": 19}}
    wishes: list[dict[str, Any]] = [
        {},
        bias,
        {**bias, "repetition_penalty": 100.0},
        {**bias, "presence_penalty": 2.0, "frequency_penalty": 2.0},
        {"allowed_token_ids": [70, 71]},
        {"bad_words": ["q", "C"]},
    ]
    chats = [{"messages": [{"role": "user", "content": "hi"}], **wish} for wish in wishes]
    answers = ask(url, "/v1/chat/completions", *chats)
    expected = [answer["choices"][0]["message"]["content"] for _, answer, _ in answers]
    assert len(set(expected)) == len(wishes), "each changes the answer"

    async def use(client: Any) -> list[Any]:
        asked = {**FIELDS, "input": "hi", "max_output_tokens": NUM_TOKENS}
        del asked["max_tokens"]
        return [await post(client, "/v1/responses", **asked, **wish) for wish in wishes]

    found = asyncio.run(with_client(url, use))
    assert [answer["output"][0]["content"][0]["text"] for _, answer, _ in found] == expected


WRONG = [
    ("/v1/completions", {"prompt": PROMPT, "logprobs": True}, "logprobs"),
    ("/v1/completions", {"prompt": PROMPT, "logprobs": 21}, "logprobs"),
    ("/v1/completions", {"prompt": PROMPT, "top_logprobs": 1}, "top_logprobs"),
    ("/v1/chat/completions", {"logprobs": 1}, "logprobs"),
    ("/v1/chat/completions", {"top_logprobs": 1}, "top_logprobs"),
    ("/v1/chat/completions", {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
]


def test_each_token_is_decoded_once_for_all_that_is_told_of_it() -> None:
    """Else one client with 128 answers holds up the event loop for 20 ms in each step."""

    class Counting(ByteTokenizer):
        num_decoded = 0

        def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
            self.num_decoded += 1
            return super().decode(token_ids, skip_special_tokens=skip_special_tokens)

    tokenizer = Counting()
    likeliest = tuple((token_id, -float(token_id)) for token_id in range(65, 85))
    for drawn in (65, 66, 90):
        told = tell(drawn, TokenLogprobs(-1.0, likeliest), tokenizer)
        assert told.text == chr(drawn)
        assert [each.text for each in told.likeliest] == [chr(each) for each, _ in likeliest]
    assert tokenizer.num_decoded == 21


@pytest.mark.parametrize(("path", "fields", "param"), WRONG)
def test_wrong_wishes_are_named(url: str, path: str, fields: dict[str, Any], param: str) -> None:
    messages = {} if "prompt" in fields else {"messages": [{"role": "user", "content": "hi"}]}
    [(status, answer, _)] = ask(url, path, {**messages, **fields})
    assert (status, answer["error"]["param"]) == (400, param)
