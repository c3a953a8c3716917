"""What was drawn in a step: tokens that may still be on the device, and what they mean."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from slosched.core import Request, ScheduledChunk, TokenLogprobs
from slosched.engine.torch.transfers import Fetched, uploaded

_NO_NUMBERS, _NO_TOKEN = -1, -2
"""What stands in the place of a token that was not drawn."""
_BARRED = "its grammar, allowed_token_ids, stop_token_ids and min_tokens leave no token"


class Draws(NamedTuple):
    """What was drawn for each request, and why nothing could be drawn for the others."""

    token_ids: dict[str, int]
    failed: dict[str, str]
    """Requests whose logits are not numbers."""
    barred: dict[str, str]
    """Requests whose own rules leave no token."""
    logprobs: dict[str, list[TokenLogprobs]]
    """Log-probabilities at the places of accepted drafts and of the drawn token, for those that
    want them."""
    num_accepted: dict[str, int]
    """How many of its first draft tokens each request emits before what was drawn for it."""


def no_draws() -> Draws:
    """Return the draws of a step in which no request gets a token."""
    return Draws({}, {}, {}, {}, {})


class Logprobs:
    """Log-probabilities of some rows, for the requests that want them."""

    def __init__(self, logits: Tensor, num_likeliest: Mapping[int, int]) -> None:
        """Keep those of the rows in `num_likeliest`, before a request's own rules change them."""
        self._num_likeliest = num_likeliest
        self._rows = uploaded(list(num_likeliest), torch.int64, logits.device)
        self._all = logits.index_select(0, self._rows).float().log_softmax(dim=-1)

    def fetch(self, tokens: Tensor) -> Callable[[], dict[int, TokenLogprobs]]:
        """Begin to copy those of the drawn tokens and of the likeliest ones to the host.

        What comes back waits for them, and returns them by row.
        """
        most = min(max(self._num_likeliest.values()), self._all.shape[-1])
        likeliest = self._all.topk(most)
        drawn = self._all.gather(1, tokens.index_select(0, self._rows)[:, None])[:, 0]
        copies = [Fetched(part) for part in (drawn, likeliest.indices, likeliest.values)]
        wanted = self._num_likeliest

        def by_row() -> dict[int, TokenLogprobs]:
            lists = (copy.wait().tolist() for copy in copies)
            return {
                row: TokenLogprobs(of_drawn, tuple(zip(ids[:num], values[:num], strict=True)))
                for (row, num), of_drawn, ids, values in zip(wanted.items(), *lists, strict=True)
            }

        return by_row


@dataclass(frozen=True)
class PendingDraws:
    """The draws of a step, of which the host may not know the tokens yet.

    There is a row for each chunk, and after it one for each of its drafts.
    """

    chunks: Sequence[ScheduledChunk]
    drafts: Mapping[str, Sequence[int]]
    num_possible: Mapping[str, int]
    """How many drafts of a request with a grammar can be accepted at most."""
    barred: Mapping[str, str]
    """Requests of which was known beforehand that they get no token."""
    tokens: Tensor
    """The token of each row, on the device; any token where none can be drawn."""
    codes: Fetched
    """The same on the way to the host, with the reason where none can be drawn."""
    logprobs: Callable[[], dict[int, TokenLogprobs]] | None
    is_last: Callable[[Request, int], bool]
    told: Mapping[str, Callable[[int], None]]
    """Functions that are told each token that their request emits, in order."""

    def wait(self) -> Draws:
        """Return the draws, once the tokens are on the host.  To be called once."""
        codes: list[int] = self.codes.wait().tolist()
        logprobs = {} if self.logprobs is None else self.logprobs()
        draws = no_draws()
        draws.barred.update(self.barred)
        first = 0
        for chunk in self.chunks:
            offered = self.drafts.get(chunk.request.request_id, ())
            self._verify(draws, chunk.request, offered, first, codes, logprobs)
            first += len(offered) + 1
        return draws

    def _verify(
        self,
        draws: Draws,
        request: Request,
        offered: Sequence[int],
        first: int,
        codes: Sequence[int],
        logprobs: Mapping[int, TokenLogprobs],
    ) -> None:
        """Go through the rows of a request from `first` on, as far as drafts are accepted."""
        name = request.request_id
        wanted = offered[: self.num_possible.get(name)]
        for num_accepted in range(len(wanted) + 1):
            row = first + num_accepted
            token = codes[row]
            if token == _NO_NUMBERS:
                draws.failed[name] = "the model's logits are not numbers"
                return
            if token == _NO_TOKEN:
                draws.barred.setdefault(name, _BARRED)
            if name in draws.barred:
                return
            if name in self.told:
                self.told[name](token)
            if row in logprobs:
                draws.logprobs.setdefault(name, []).append(logprobs[row])
            is_accepted = num_accepted < len(wanted) and token == wanted[num_accepted]
            if not is_accepted or self.is_last(request, token):
                draws.token_ids[name] = token
                if wanted:
                    draws.num_accepted[name] = num_accepted
                return


def coded(tokens: Tensor, are_numbers: Tensor, greatest: Tensor) -> Tensor:
    """Return the tokens, with the reason in the place of each that cannot be drawn.

    `greatest` is the greatest logit of each row after the rules of its request.
    """
    codes = tokens.masked_fill(greatest == float("-inf"), _NO_TOKEN)
    return codes.masked_fill_(~are_numbers, _NO_NUMBERS)
