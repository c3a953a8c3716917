"""ShareGPT: conversations as text, from which lengths in tokens are estimated."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence

from slosched.workload.readers.rows import Row
from slosched.workload.request import TraceRequest

TokenCounter = Callable[[str], int]

ESTIMATE = "the larger of 4/3 tokens a word and 1 token per 4 bytes of UTF-8"
_ASKING = ("human", "user")
_ANSWERING = ("gpt", "chatgpt", "assistant", "bard", "bing")
_SHAPE = "a list of turns, each with the texts `from` and `value`"
_IDEOGRAPH = r"\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
_WORDS = re.compile(f"[{_IDEOGRAPH}]|[^\\s{_IDEOGRAPH}]+")


def estimate_tokens(text: str) -> int:
    """Estimate the tokens of a text by `ESTIMATE`; a CJK character counts as a word.

    The count of words fits prose; the count of bytes fits code and tables, whose words are long.
    Against the tokenizer of SmolLM2 the estimate is 0.69 to 1.07 times as much on this project's
    documents and sources, and 1.2 times on a plain English sentence.  Newer tokenizers with larger
    vocabularies make fewer tokens.
    """
    words = len(_WORDS.findall(text))
    return max(math.ceil(words * 4 / 3), math.ceil(len(text.encode("utf-8", "replace")) / 4))


def first_exchange(row: Row, count_tokens: TokenCounter = estimate_tokens) -> TraceRequest | None:
    """Return the first question of a conversation with its answer, as benchmarks usually do.

    Later turns are left out: their prompts contain another model's answers, and nothing says when
    they were asked.  Returns None if the conversation does not begin with a question and an answer.
    """
    turns = _turns(row)
    system = next((i for i, turn in enumerate(turns) if turn["from"] != "system"), len(turns))
    if len(turns) < system + 2:
        return None
    question, answer = turns[system : system + 2]
    if question["from"] not in _ASKING or answer["from"] not in _ANSWERING:
        return None
    prompt = "\n".join(turn["value"] for turn in turns[: system + 1])
    num_prompt_tokens, num_output_tokens = count_tokens(prompt), count_tokens(answer["value"])
    if min(num_prompt_tokens, num_output_tokens) < 1:
        return None
    return TraceRequest(str(row.number), 0.0, num_prompt_tokens, num_output_tokens)


def _turns(row: Row) -> Sequence[Mapping[str, str]]:
    turns = row.values.get("conversations")
    if not isinstance(turns, list):
        raise row.wrong("conversations", _SHAPE)
    for turn in turns:
        if not isinstance(turn, dict) or not all(
            isinstance(turn.get(key), str) for key in ("from", "value")
        ):
            raise row.wrong("conversations", _SHAPE)
    return turns
