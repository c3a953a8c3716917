"""An executor that checks which token each KV block holds, to find errors in block bookkeeping."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable

from slosched.core import Executor, Request, ScheduledBatch, SloschedError, StepResult

Contents = dict[int, Hashable]
"""A block's content: by position in it, an identity of the token and all tokens before it."""


class WrongBlockError(SloschedError, AssertionError):
    """A request would read or overwrite KV that belongs to another request."""


class CheckedMemory:
    """An executor that runs a batch on another only if every chunk finds its own tokens in its
    blocks."""

    def __init__(
        self, executor: Executor, block_size: int, window_tokens: int | None = None
    ) -> None:
        """With `window_tokens`, a token only reads so many last tokens, itself included."""
        self._executor = executor
        self._block_size = block_size
        self._window_tokens = math.inf if window_tokens is None else window_tokens
        # A block that has not been written yet holds nothing.
        self._device: defaultdict[int, Contents] = defaultdict(dict)
        self._host: defaultdict[int, Contents] = defaultdict(dict)

    def execute(self, batch: ScheduledBatch) -> StepResult:
        self._check(batch)
        return self._executor.execute(batch)

    def release(self, request_id: str) -> None:
        self._executor.release(request_id)

    def _check(self, batch: ScheduledBatch) -> None:
        """Apply the batch to the memory as a device would: swap out, copy, swap in, write; then
        check reads."""
        for device_block, host_block in batch.swap_out:
            self._host[host_block] = dict(self._device[device_block])
        copied = [(target, dict(self._device[source])) for source, target in batch.device_copies]
        self._device.update(copied)
        for device_block, host_block in batch.swap_in:
            self._device[device_block] = dict(self._host[host_block])
        size, device = self._block_size, self._device
        for request, num_new, num_prior, _, table in batch.chunks:
            if len(table) * size < num_prior + num_new:
                raise WrongBlockError(
                    f"{request.request_id!r} holds {len(table)} blocks of {size} tokens, too few "
                    f"for {num_prior + num_new}"
                )
            for position in range(num_prior, num_prior + num_new):
                if position % size == 0:
                    device[table[position // size]] = {}
                device[table[position // size]][position % size] = token_at(request, position)
        for request, num_new, num_prior, _, table in batch.chunks:
            last = num_prior + num_new - 1
            first = max(0, num_prior - self._window_tokens + 1)
            for position in (*range(size - 1, last, size), last):
                if position < first:
                    continue
                block, token = table[position // size], token_at(request, position)
                if (found := device[block].get(position % size)) != token:
                    raise WrongBlockError(
                        f"{request.request_id!r} finds {found} in block {block} at token "
                        f"{position}, not its own {token}"
                    )


def token_at(request: Request, position: int) -> Hashable:
    """Return an identity of the token at `position` together with all tokens before it.

    Requests share identities as far as their prefix hashes agree.  Beyond those, a token of the
    prompt belongs to the request's group, and any other one to the request alone.
    """
    hashes, block = request.prefix_hashes, request.prefix_block_tokens
    if block and position < min(request.num_prompt_tokens, len(hashes) * block):
        return position, tuple(hashes[: position // block + 1])
    if request.group is not None and position < request.num_prompt_tokens:
        return position, request.group.group_id
    return position, request.request_id
