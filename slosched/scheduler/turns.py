"""Requests that take from the prefix cache what it holds when their turn in a plan comes."""

from __future__ import annotations

from slosched.core import BlockLedger, IllegalPlanError, Request, SchedulerOutput
from slosched.core.merged_blocks import RepeatingOutput


class Turns:
    """The tokens that each request of a plan has when its turn comes, in the plan's order.

    It serves plans that say how much is found (`SchedulerOutput.num_found_tokens`).  In all others
    a request has the tokens that it says are computed.
    """

    def __init__(self, output: SchedulerOutput, ledger: BlockLedger, num_lent: int) -> None:
        """Begin the plan `output`; `num_lent` blocks go to decodes that it does not contain."""
        self._found = output.num_found_tokens
        self._ledger = ledger
        self._num_lent = num_lent
        self._planned: dict[str, int] = {}

    def num_prior_tokens(self, request: Request, num_new_tokens: int) -> int:
        """Return the tokens that the next request of the plan need not compute.

        Raise IllegalPlanError if the plan says that it finds another number of tokens.
        """
        num = self._num_found(request)
        self._planned[request.request_id] = num_new_tokens
        return num

    def _num_found(self, request: Request) -> int:
        request_id = request.request_id
        num = self._found.get(request_id, request.num_computed_tokens)
        if request_id in self._found and num != self._ledger.find(
            request_id, self._planned, self._num_lent
        ):
            raise IllegalPlanError(f"{request_id!r} does not find {num} tokens at its turn")
        return num


class RepeatingTurns(Turns):
    """Turns of a plan of vLLM V0, in which some requests compute their last token again."""

    def __init__(self, output: RepeatingOutput, ledger: BlockLedger, num_lent: int) -> None:
        super().__init__(output, ledger, num_lent)
        if not output.repeated <= output.num_scheduled_tokens.keys():
            raise IllegalPlanError("a request repeats a token but is not scheduled")
        self._repeated = output.repeated

    def num_prior_tokens(self, request: Request, num_new_tokens: int) -> int:
        request_id = request.request_id
        if request_id not in self._repeated:
            return super().num_prior_tokens(request, num_new_tokens)
        num = self._num_found(request)
        if num_new_tokens != 1 or not num:
            raise IllegalPlanError(
                f"{request_id!r} repeats {num_new_tokens} of {num} computed tokens, not the last"
            )
        self._planned[request_id] = 0
        return num - 1


def turns_of(output: SchedulerOutput, ledger: BlockLedger, num_lent: int) -> Turns | None:
    """Return the turns of a plan, or None if every request has what it says is computed."""
    if isinstance(output, RepeatingOutput):
        return RepeatingTurns(output, ledger, num_lent)
    return Turns(output, ledger, num_lent) if output.num_found_tokens else None
