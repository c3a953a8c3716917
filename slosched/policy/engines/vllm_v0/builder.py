"""A batch builder with which a request may compute its last token again."""

from __future__ import annotations

from dataclasses import fields

from slosched.batch import BatchBuilder
from slosched.core import DecodeGroup, Request, SchedulerOutput, SchedulerView
from slosched.core.merged_blocks import RepeatingOutput


class RepeatingBuilder(BatchBuilder):
    """A `BatchBuilder` that can also repeat the last computed token of a request."""

    __slots__ = ("repeated",)

    def __init__(self, view: SchedulerView, *, beside: DecodeGroup | None = None) -> None:
        super().__init__(view, beside=beside)
        self.repeated: set[str] = set()

    def repeat(self, request: Request) -> int:
        """Schedule the last computed token of `request` again; return 1, or 0 if it must not run.

        The request takes its place in the step, and its blocks, and makes no progress.
        """
        if not self._num_prior_tokens(request):
            raise ValueError(f"{request.request_id!r} has no computed token that it could repeat")
        if self._tokens_wanted(request, 1) < 1 or not self._may_run(request):
            return 0
        self.repeated.add(request.request_id)
        missing = self.blocks_missing(request, 1)
        if missing > self.num_free_blocks:
            self.repeated.remove(request.request_id)
            return 0
        self._take(request, 1, missing)
        return 1

    def find(self, request: Request) -> int:
        planned = self.num_scheduled_tokens
        if self.repeated:
            planned = {name: n - (name in self.repeated) for name, n in planned.items()}
        return self._find(request, planned)

    def build(self) -> SchedulerOutput:
        output = super().build()
        if not self.repeated:
            return output
        decided = {field.name: getattr(output, field.name) for field in fields(output)}
        return RepeatingOutput(**decided, repeated=frozenset(self.repeated))

    def _num_prior_tokens(self, request: Request) -> int:
        if not (self._found or self.repeated):
            return request.num_computed_tokens
        found = self._found.get(request.request_id, request.num_computed_tokens)
        return found - (request.request_id in self.repeated)
