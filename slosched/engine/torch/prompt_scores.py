"""Log-probabilities of prompts, from the steps that compute them.

The logits of a whole prompt would take vocabulary times prompt: 60 GB for 100,000 tokens of
a vocabulary of 150,000.  So the step keeps the hidden states behind its last layer, and the logits
are made of some of them at a time.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slosched.core import PromptLogprobs, ScheduledChunk
from slosched.engine.torch.transfers import Fetched, uploaded

_ROWS = 128
"""Tokens whose logits are there at a time: 77 MB in float32 for a vocabulary of 150,000."""

PendingScores = Callable[[], Mapping[str, PromptLogprobs]]
"""Waits for what is told of prompts in a step, and returns it by request."""


def no_scores() -> Mapping[str, PromptLogprobs]:
    """Return what a step tells in which no request wants to be told anything."""
    return {}


class PromptSpan(NamedTuple):
    """Tokens of a chunk whose successors in the prompt are to be told."""

    request_id: str
    row: int
    """The place of the first one among the tokens of the step."""
    first: int
    """The place of its successor in the prompt."""
    successors: Sequence[int]
    num_likeliest: int


@contextmanager
def keeping_hidden(model: Any, kept: list[Any] | None) -> Iterator[None]:
    """Append what the model's decoder returns in the forward pass to `kept`, unless it is None."""
    if kept is None:
        yield
        return

    def keep(_module: Any, _inputs: Any, output: Any) -> None:
        kept.append(output)

    hook = model.base_model.get_decoder().register_forward_hook(keep)
    try:
        yield
    finally:
        hook.remove()


def head_logits(model: Any, of_decoder: Any, hidden: Tensor) -> Tensor:
    """Return the logits [rows, vocabulary] of hidden states [rows, size].

    They are what the model makes of them, also if it scales or caps logits: it runs with a decoder
    that does nothing but return these states, and beside them what it returned with others.
    """
    output = replace(of_decoder, last_hidden_state=hidden[None])
    decoder = model.base_model.get_decoder()
    decoder.forward = lambda *_args, **_kwargs: output
    try:
        token_ids = torch.zeros((1, len(hidden)), dtype=torch.long, device=hidden.device)
        logits: Tensor = model(input_ids=token_ids, use_cache=False).logits[0]
    finally:
        del decoder.forward  # that of its class shows again
    return logits


class PromptScores:
    """Tells of each prompt that wants it the log-probabilities of its tokens, each once."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._num_told: dict[str, int] = {}
        """How many tokens of a prompt have been computed and their successors told."""

    def spans(self, chunks: Sequence[ScheduledChunk]) -> list[PromptSpan]:
        """Return the tokens of a step whose successors are to be told; they count as told then."""
        found, row = [], 0
        for chunk in chunks:
            request, prior = chunk.request, chunk.num_prior_tokens
            last = request.num_prompt_tokens - 1
            if prior < last and request.tells_prompt:
                name = request.request_id
                start = max(prior, self._num_told.get(name, 0))
                stop = min(prior + chunk.num_new_tokens, last)
                num_likeliest = request.sampling.num_prompt_logprobs
                if start < stop and num_likeliest is not None:
                    ids = request.prompt_token_ids
                    after = [0] * (stop - start) if ids is None else ids[start + 1 : stop + 1]
                    first = row + start - prior
                    found.append(PromptSpan(name, first, start + 1, after, num_likeliest))
                    self._num_told[name] = stop
            row += chunk.num_new_tokens
        return found

    def launch(self, spans: Sequence[PromptSpan], of_decoder: Any) -> PendingScores:
        """Begin to find what is told, from what the model's decoder returned for the whole step."""
        hidden: Tensor = of_decoder.last_hidden_state[0]
        device = hidden.device
        rows = [row for span in spans for row in range(span.row, span.row + len(span.successors))]
        after = [token for span in spans for token in span.successors]
        places = uploaded(rows, torch.int64, device).split(_ROWS)
        successors = uploaded(after, torch.int64, device).split(_ROWS)
        most = max(span.num_likeliest for span in spans)
        parts = [
            _scores(head_logits(self._model, of_decoder, hidden.index_select(0, at)), tokens, most)
            for at, tokens in zip(places, successors, strict=True)
        ]
        fetched = [Fetched(torch.cat(columns)) for columns in zip(*parts, strict=True)]
        return lambda: _by_request(spans, *(column.wait() for column in fetched))

    def release(self, request_id: str) -> None:
        """Forget a request that has ended."""
        self._num_told.pop(request_id, None)


def _scores(logits: Tensor, tokens: Tensor, num_likeliest: int) -> tuple[Tensor, ...]:
    """Return for each row the log-probability and the rank of its token, and the likeliest ones."""
    own = logits.gather(1, tokens[:, None])
    ranks = (logits > own).sum(dim=-1, dtype=torch.int32) + 1
    values, ids = logits.topk(min(num_likeliest, logits.shape[-1]))
    totals = logits.float().logsumexp(dim=-1, keepdim=True)
    return (own - totals)[:, 0], ranks, ids.int(), values - totals


def _by_request(
    spans: Sequence[PromptSpan], own: Tensor, ranks: Tensor, ids: Tensor, likeliest: Tensor
) -> dict[str, PromptLogprobs]:
    found, begin = {}, 0
    for span in spans:
        end, num = begin + len(span.successors), min(span.num_likeliest, ids.shape[1])
        found[span.request_id] = PromptLogprobs(
            span.first,
            _floats(own[begin:end]),
            _integers(ranks[begin:end]),
            num,
            _integers(ids[begin:end, :num]),
            _floats(likeliest[begin:end, :num]),
        )
        begin = end
    return found


def _floats(values: Tensor) -> array[float]:
    return array("f", values.float().contiguous().numpy().tobytes())


def _integers(values: Tensor) -> array[int]:
    return array("i", values.contiguous().numpy().tobytes())
