"""What is told of prompts: `echo` of OpenAI's completions, and `prompt_logprobs` of vLLM."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import openai
import pytest
from live_server import live, post, stream, with_client
from openai.types.completion import Completion
from test_server_logprobs import odds

from slosched.engine.server.long_json import LongList, in_parts

if TYPE_CHECKING:
    from slosched.engine.server import HuggingFaceTokenizer
    from slosched.engine.torch import LoadedModel

PATH, CHAT = "/v1/completions", "/v1/chat/completions"
TEXT = "Wörter, words and 🙂"
KEYS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
GREEDY: dict[str, Any] = {"max_tokens": 4, "min_tokens": 4, "temperature": 0}


def ask(url: str, *bodies: dict[str, Any], path: str = PATH) -> list[Any]:
    async def use(client: Any) -> list[Any]:
        return [await post(client, path, **body) for body in bodies]

    return asyncio.run(with_client(url, use))


def answers(url: str, *bodies: dict[str, Any], path: str = PATH) -> list[Any]:
    found = ask(url, *bodies, path=path)
    assert [status for status, _, _ in found] == [200] * len(bodies), found
    return [answer for _, answer, _ in found]


def check_told(told: Any, ids: list[int], model: LoadedModel, num: int) -> None:
    """Check vLLM's `prompt_logprobs` against transformers."""
    assert told[0] is None
    assert len(told) == len(ids)
    for entries, token, row in zip(told[1:], ids[1:], odds(model, ids), strict=False):
        own = float(row[token])
        assert entries[str(token)]["logprob"] == pytest.approx(own, abs=1e-3)
        assert entries[str(token)]["rank"] == int((row > own).sum()) + 1
        best = {str(i): v for v, i in zip(*(x.tolist() for x in row.topk(num)), strict=True)}
        assert entries.keys() == {str(token), *best}
        for token_id, value in best.items():
            assert entries[token_id]["logprob"] == pytest.approx(value, abs=1e-3)


def test_an_echo_has_the_prompt_and_its_log_probabilities(
    url: str, model: LoadedModel, tokenizer: HuggingFaceTokenizer
) -> None:
    body = {**GREEDY, "prompt": TEXT, "logprobs": 3, "return_token_ids": True}
    [alone, echoed] = answers(url, body, {**body, "echo": True})
    [plain], [choice] = alone["choices"], echoed["choices"]
    assert choice["text"] == TEXT + plain["text"]
    assert choice["finish_reason"] == "length"
    assert echoed["usage"]["completion_tokens"] == 4
    assert echoed["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    ids, told = [*choice["prompt_token_ids"], *choice["token_ids"]], choice["logprobs"]
    texts = [tokenizer.decode([i], skip_special_tokens=False) for i in ids]
    assert told["tokens"] == texts
    assert told["text_offset"] == [sum(map(len, texts[:i])) for i in range(len(texts))]
    assert (told["token_logprobs"][0], told["top_logprobs"][0]) == (None, None)
    rows = odds(model, ids)
    expected = [float(row[i]) for row, i in zip(rows, ids[1:], strict=False)]
    assert told["token_logprobs"][1:] == pytest.approx(expected, abs=1e-3)
    for row, likeliest, i in zip(rows, told["top_logprobs"][1:], ids[1:], strict=False):
        best: dict[str, float] = {}
        for value, token in zip(*(part.tolist() for part in row.topk(3)), strict=True):
            best.setdefault(tokenizer.decode([token], skip_special_tokens=False), value)
        best.setdefault(tokenizer.decode([i], skip_special_tokens=False), float(row[i]))
        assert likeliest == pytest.approx(best, abs=1e-3)
    for key in ("tokens", "token_logprobs", "top_logprobs"):
        assert told[key][-4:] == plain["logprobs"][key]


def test_an_echo_without_log_probabilities_is_the_text_alone(url: str) -> None:
    prompts: list[Any] = [TEXT, list(range(60, 70))]
    body = {**GREEDY, "prompt": prompts, "n": 2, "seed": 1, "temperature": 1}
    [alone, echoed] = answers(url, body, {**body, "echo": True})
    texts = [TEXT, TEXT, *["".join(map(chr, range(90, 100)))] * 2]
    for plain, choice, text in zip(alone["choices"], echoed["choices"], texts, strict=True):
        assert choice["text"] == text + plain["text"]
        assert choice["logprobs"] is None


def test_prompts_are_scored_without_an_answer(url: str, model: LoadedModel) -> None:
    """As evaluation harnesses do: several prompts, no tokens, the log-probabilities."""
    prompts = [[5, 6, 7, 8], [9, 9], [4]]
    body = {"prompt": prompts, "max_tokens": 0, "echo": True, "logprobs": 1}
    [answer] = answers(url, {**body, "n": 2, "return_token_ids": True})
    assert answer["usage"]["completion_tokens"] == 0
    assert answer["usage"]["total_tokens"] == 7
    for choice in answer["choices"]:
        ids = prompts[choice["index"] // 2]
        assert (choice["token_ids"], choice["finish_reason"]) == ([], "length")
        assert choice["prompt_token_ids"] == ids
        expected = [float(row[i]) for row, i in zip(odds(model, ids), ids[1:], strict=False)]
        told = choice["logprobs"]["token_logprobs"]
        assert told[0] is None
        assert told[1:] == pytest.approx(expected, abs=1e-3)
        assert {len(choice["logprobs"][key]) for key in KEYS} == {len(ids)}


@pytest.mark.parametrize("fields", [{"max_tokens": 0}, GREEDY])
def test_a_stream_echoes_the_same(url: str, fields: dict[str, Any]) -> None:
    body = {**fields, "prompt": [TEXT, "b"], "n": 2, "seed": 3, "echo": True, "logprobs": 2}
    body["stream_options"] = None

    async def use(client: Any) -> tuple[Any, list[Any]]:
        _, whole, _ = await post(client, **body)
        return whole, await stream(client, **{**body, "stream_options": {"include_usage": True}})

    whole, events = asyncio.run(with_client(url, use))
    assert events[-1]["usage"] == whole["usage"]
    for expected in whole["choices"]:
        choices = [c for e in events for c in e["choices"] if c["index"] == expected["index"]]
        assert "".join(c["text"] for c in choices) == expected["text"]
        assert choices[-1]["finish_reason"] == expected["finish_reason"]
        for key in KEYS:
            parts = [each for c in choices for each in (c["logprobs"] or {key: []})[key]]
            assert parts == expected["logprobs"][key], key


def test_completions_and_chats_have_vllms_prompt_logprobs(url: str, model: LoadedModel) -> None:
    body = {**GREEDY, "prompt": [[5, 6, 7, 8], [9, 9, 10]], "prompt_logprobs": 2, "n": 2}
    [answer] = answers(url, {**body, "return_token_ids": True})
    Completion.model_validate(answer)
    for choice in answer["choices"]:
        check_told(choice["prompt_logprobs"], choice["prompt_token_ids"], model, 2)
        assert choice["logprobs"] is None
    messages = [{"role": "user", "content": "hi"}]
    chat = {**GREEDY, "messages": messages, "prompt_logprobs": 0, "return_token_ids": True}
    [answer] = answers(url, chat, path=CHAT)
    check_told(answer["prompt_logprobs"], answer["prompt_token_ids"], model, 0)
    assert "prompt_logprobs" not in answer["choices"][0]


def test_a_prompt_that_is_told_is_computed_again(url: str, model: LoadedModel) -> None:
    prompt = list(range(40, 80))
    bodies = [{**GREEDY, "prompt": prompt, **more} for more in ({}, {"prompt_logprobs": 1}, {})]
    first, told, last = answers(url, *bodies)
    cached = [a["usage"]["prompt_tokens_details"]["cached_tokens"] for a in (first, told, last)]
    assert cached == [0, 0, 36]
    check_told(told["choices"][0]["prompt_logprobs"], prompt, model, 1)
    assert len({a["choices"][0]["text"] for a in (first, told, last)}) == 1


def test_the_official_client_scores_a_prompt(url: str) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        answer = client.completions.create(
            model="tiny", prompt=TEXT, max_tokens=0, echo=True, logprobs=1
        )
    told = answer.choices[0].logprobs
    assert answer.choices[0].text == TEXT
    assert told is not None
    assert told.token_logprobs is not None
    assert told.tokens is not None
    assert len(told.token_logprobs) == len(told.tokens) == len(TEXT.encode())


WRONG = [
    ({"echo": 1}, "echo"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 0, "echo": True, "min_tokens": 1}, "min_tokens"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": True}, "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"prompt_logprobs": 0, "use_beam_search": True}, "prompt_logprobs"),
    ({"logprobs": 0, "use_beam_search": True}, "logprobs"),
    ({"echo": True, "use_beam_search": True}, "echo"),
    ({"prompt": [[5] * 400] * 40, "prompt_logprobs": 20}, "prompt_logprobs"),
    ({"prompt": [[5] * 400] * 40, "echo": True, "logprobs": 20}, "logprobs"),
]


@pytest.mark.parametrize(("fields", "param"), WRONG)
def test_wrong_wishes_are_named(url: str, fields: dict[str, Any], param: str) -> None:
    [(status, answer, _)] = ask(url, {"prompt": [5, 6], **fields})
    assert (status, answer["error"]["param"]) == (400, param)


def test_a_chat_has_no_echo(url: str) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "echo": True}
    [(status, answer, _)] = ask(url, body, path=CHAT)
    assert (status, answer["error"]["param"]) == (400, "echo")


def test_a_device_without_a_model_echoes_text_and_has_no_log_probabilities() -> None:
    with live() as server:
        status, answer, _ = server.post(prompt="abc", max_tokens=2, echo=True)
        assert (status, answer["choices"][0]["text"]) == (200, "abcab")
        status, answer, _ = server.post(prompt="abc", max_tokens=0, echo=True)
        assert (status, answer["choices"][0]["text"]) == (200, "abc")
        assert answer["usage"]["completion_tokens"] == 0
        status, answer, _ = server.post(prompt="abc", prompt_logprobs=1)
        assert (status, answer["error"]["param"]) == (400, "prompt_logprobs")


def test_a_long_list_may_stand_anywhere_in_a_document() -> None:
    import json

    for num_items, at_a_time in ((0, 3), (1, 1), (7, 3), (6, 3)):
        items = [{"text": f'"é{i}"'} for i in range(num_items)]
        lists = {"a": [{"b": LongList(iter(items), at_a_time)}], "c": LongList(items, 1), "d": 1}
        parts = list(in_parts(lists))
        assert json.loads(b"".join(parts)) == {"a": [{"b": items}], "c": items, "d": 1}
    assert len(parts) > 6, "no part has more than it should"
