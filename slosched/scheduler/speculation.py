"""Speculative decoding: the scheduler lets decodes verify draft tokens in what a plan leaves.

A draft is one token more of a decode.  The step computes all drafts of a request after its last
known token, and so learns in one pass which of them the model would have emitted.  Those up to the
first wrong one are emitted, and one more token, which the same pass gives.  The policy says how
many drafts are worth their time (`Policy.choose_drafts`), a proposer says which tokens they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import repeat
from typing import Protocol

from slosched.core import (
    BatchShape,
    DraftOffer,
    Policy,
    Request,
    SchedulerOutput,
    SchedulerView,
)
from slosched.scheduler.acceptance import Acceptance
from slosched.scheduler.plan_check import Spare


class Proposer(Protocol):
    """A source of draft tokens."""

    def propose(self, request: Request, max_tokens: int) -> Sequence[int]:
        """Return at most `max_tokens` drafts after a request's last token, often none."""

    def release(self, request_id: str) -> None:
        """Forget a request that has ended."""


class Speculation:
    """Adds draft tokens to plans, and learns how many of them are accepted."""

    def __init__(self, proposer: Proposer, num_draft_tokens: int) -> None:
        """`num_draft_tokens` is the most that a request verifies in a step."""
        if num_draft_tokens < 1:
            raise ValueError(f"at least one token is to be drafted, not {num_draft_tokens}")
        self._proposer = proposer
        self._num_draft_tokens = num_draft_tokens
        self.acceptance = Acceptance()
        self.must_wait = False
        """Whether the next plan has to wait for the tokens of the last one: it verifies drafts, or
        would have done so had all tokens been known."""
        self.num_drafted = 0
        """Draft tokens that were verified so far."""
        self.num_accepted = 0

    @property
    def max_draft_tokens(self) -> int:
        """Return the most draft tokens that a request verifies in a step."""
        return self._num_draft_tokens

    def with_drafts(
        self,
        output: SchedulerOutput,
        view: SchedulerView,
        policy: Policy,
        running: Mapping[str, Request],
        spare: Spare,
    ) -> SchedulerOutput:
        """Return `policy`'s plan with draft tokens for decodes among the `running` requests.

        They take nothing that the plan uses: `spare` is what it leaves.
        """
        self.must_wait = False
        self.acceptance.begin_step()
        offers = self._offers(output, running, spare)
        if not offers:
            return output
        if output.shape is None:
            output = replace(output, shape=_shape_of(output, view))
        chosen = policy.choose_drafts(offers, output, view)
        drafts = self._proposed(offers, chosen, spare, view.kv.block_size)
        if not drafts:
            return output
        self.must_wait = True
        scheduled = dict(output.num_scheduled_tokens)
        for request_id, tokens in drafts.items():
            scheduled[request_id] += len(tokens)
        return replace(output, num_scheduled_tokens=scheduled, draft_token_ids=drafts, shape=None)

    def _proposed(
        self, offers: Sequence[DraftOffer], chosen: Sequence[int], spare: Spare, block_size: int
    ) -> dict[str, Sequence[int]]:
        """Return draft tokens of the requests, as many as are chosen and have room."""
        drafts: dict[str, Sequence[int]] = {}
        num_tokens, num_blocks = spare
        for (request, max_tokens, _), num_chosen in zip(offers, chosen, strict=True):
            if num_chosen <= 0:
                continue
            # What the plan leaves of the request's last block.
            num_fitting = -(request.num_computed_tokens + 1) % block_size
            room = num_fitting + num_blocks * block_size
            most = min(num_chosen, max_tokens, num_tokens, room)
            if most <= 0:
                continue
            if request.num_output_placeholders:  # nobody knows yet what to go on from
                self.must_wait = True
                continue
            if tokens := self._proposer.propose(request, most):
                drafts[request.request_id] = tokens
                num_tokens -= len(tokens)
                num_blocks -= max(0, -((num_fitting - len(tokens)) // block_size))
        return drafts

    def note(self, request_id: str, num_drafts: int, num_accepted: int) -> None:
        """Learn how many of a request's draft tokens were accepted."""
        self.acceptance.note(request_id, num_drafts, num_accepted)
        self.num_drafted += num_drafts
        self.num_accepted += num_accepted

    def forget(self, request_id: str) -> None:
        """Forget a request that has ended."""
        self.acceptance.forget(request_id)
        self._proposer.release(request_id)

    def _offers(
        self, output: SchedulerOutput, running: Mapping[str, Request], spare: Spare
    ) -> list[DraftOffer]:
        """Return the decodes of a plan that may verify drafts, in its order."""
        if not spare.num_tokens:
            return []
        most = self._num_draft_tokens
        decodes: dict[str, Request] = {}
        limits: list[int] = []
        for request_id, n in output.num_scheduled_tokens.items():
            if n != 1 or (request := running.get(request_id)) is None:
                continue
            num_outputs = request.num_output_tokens
            num_left = request.max_tokens - num_outputs - 1
            # There are hundreds, for which calling `is_decode` would take its time.
            known = request.num_prompt_tokens + num_outputs
            if num_outputs and num_left > 0 and known - request.num_computed_tokens == 1:
                decodes[request_id] = request
                limits.append(most if num_left > most else num_left)
        offers = zip(decodes.values(), limits, self.acceptance.of(decodes), strict=True)
        # The named tuple's own constructor is a Python function; this one is not.
        return list(map(tuple.__new__, repeat(DraftOffer), offers))


def _shape_of(output: SchedulerOutput, view: SchedulerView) -> BatchShape:
    """Return the shape of a plan whose policy has not summed it up, without its copies."""
    shape, scheduled = BatchShape(), output.num_scheduled_tokens
    waiting = view.waiting if _starts_any(scheduled, view) else ()
    for request in (*view.running, *view.swapped, *waiting):
        if n := scheduled.get(request.request_id):
            found = output.num_found_tokens.get(request.request_id, request.num_computed_tokens)
            shape.add(n, found)
    return shape


def _starts_any(scheduled: Mapping[str, int], view: SchedulerView) -> bool:
    held = (*view.running, *view.swapped)
    return sum(request.request_id in scheduled for request in held) < len(scheduled)
