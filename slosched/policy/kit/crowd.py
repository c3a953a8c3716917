"""Whether the answers to one prompt, all at once, leave the device time for others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from slosched.core import BatchShape, DecodeGroup, LatencyModel, Request

_FULL = 0.75
"""The share of the time that decodes may take, these answers among them; prompts have the rest."""
_MUCH = 0.1
"""The share of the time from which the answers to one prompt are judged by that."""
_LIKELY_TOKENS = 1000
"""No answer is expected to be longer, whatever its limit is."""


class Crowd:
    """The decodes that run.

    A policy can let a single request wait when decodes take all the time.  The answers to one
    prompt (`n`) begin together once it is computed, and then nothing can be done.
    """

    def __init__(self) -> None:
        self._running: Sequence[Request] = ()
        self._group: DecodeGroup | None = None

    def note(self, running: Sequence[Request], group: DecodeGroup | None = None) -> None:
        """Note what runs: all of it, or what runs beside a group of decodes."""
        self._running, self._group = running, group

    def too_long_s(
        self, request: Request, model: LatencyModel, awaited: Iterable[Request]
    ) -> float | None:
        """Return the time of a step with all decodes if the answers to `request` are too many.

        Returns None if they are not.  Several answers to one of the `awaited` prompts begin before
        them.

        A decode takes a share of the time: what it adds to a step, over its TPOT.  A step alone
        takes a share, too: its time without what decodes add, over the tightest TPOT.  Decodes
        whose TPOT is less than that time cannot keep it, and have none here.
        """
        num_new, tpot_s = num_answers(request), request.slo.tpot_s
        if num_new == 1 or request.max_tokens == 1:  # which is no decode
            return None
        decodes, num_tokens = self._decodes()
        for each in awaited:
            if num_answers(each) == 1:  # a policy can let it wait
                continue
            decodes[each.slo.tpot_s] += num_answers(each)
            num_tokens += num_answers(each) * _halfway_tokens(each)
        decodes[tpot_s] += num_new
        num_tokens += num_new * _halfway_tokens(request)
        num_decodes = decodes.total()
        context = max(1, num_tokens // num_decodes)
        one_s, all_s = (step_s(number, context, model) for number in (1, num_decodes))
        added_s = (all_s - one_s) / (num_decodes - 1)
        kept = {each_s: number for each_s, number in decodes.items() if each_s >= one_s}
        if tpot_s not in kept or num_new * added_s < _MUCH * tpot_s:
            return None
        taken = one_s / min(kept) + sum(
            added_s * number / each_s for each_s, number in kept.items()
        )
        return all_s if taken > _FULL else None

    def _decodes(self) -> tuple[Counter[float], int]:
        """Return the numbers of running decodes by TPOT, and their tokens in all."""
        decodes = [request for request in self._running if request.is_decode]
        found = Counter(request.slo.tpot_s for request in decodes)
        num_tokens = sum(request.num_tokens for request in decodes)
        if self._group is not None:
            found.update(self._group.num_by_tpot_s)
            num_tokens += self._group.context_tokens
        return found, num_tokens


def num_answers(request: Request) -> int:
    """Return how many answers to its prompt a request and its siblings are."""
    return 1 if request.group is None else len(request.group.members)


def _halfway_tokens(request: Request) -> int:
    """Return the context of an answer when half of it is there."""
    return request.num_prompt_tokens + min(request.max_tokens, _LIKELY_TOKENS) // 2


def step_s(num_decodes: int, context_tokens: int, model: LatencyModel) -> float:
    """Return the time of a step of decodes, each after so many tokens."""
    shape = BatchShape()
    shape.add_decodes([context_tokens] * num_decodes)
    return model.predict(shape)


def decode_s(request: Request, model: LatencyModel) -> float:
    """Return the time of a step in which its second token is alone on the device.

    With several answers to its prompt it is the step of all their second tokens.
    """
    return step_s(num_answers(request), request.num_prompt_tokens, model)
