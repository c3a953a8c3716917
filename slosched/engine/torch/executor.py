"""TorchExecutor: runs a scheduled batch as block copies and one forward pass of a real model."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from slosched.core import PLACEHOLDER, Request, ScheduledBatch, ScheduledChunk, StepResult
from slosched.engine.torch.attention import PagedStep, TokenSpan, forward
from slosched.engine.torch.kv_cache import PagedKVCache
from slosched.engine.torch.model import LoadedModel
from slosched.engine.torch.sampling import Draws, Sampler


class TorchExecutor:
    """Runs steps on a model loaded by `load_model`.

    `num_blocks`, `block_size` and `num_host_blocks` must be those of the scheduler's KV
    bookkeeping.  `seed` is for requests that sample without a seed of their own.
    """

    def __init__(
        self,
        model: LoadedModel,
        *,
        num_blocks: int,
        block_size: int = 16,
        num_host_blocks: int = 0,
        seed: int = 0,
    ) -> None:
        self._model = model
        self._cache = PagedKVCache(
            model.geometry,
            num_blocks=num_blocks,
            block_size=block_size,
            num_host_blocks=num_host_blocks,
            device=model.device,
        )
        self._sampler = Sampler(model.eos_token_ids, model.device, seed)
        self._newest_tokens: dict[str, int] = {}
        """The last token of each request, which the next step may need before the scheduler has it.
        """
        self._spoilt_blocks: set[int] = set()
        """Blocks whose content may not be numbers, from requests that failed."""

    def execute(self, batch: ScheduledBatch) -> StepResult:
        """Copy blocks out, copy blocks in, run all chunks in one pass, sample.

        A chunk whose request has no token ids (in a profiling run) gets arbitrary ones.  Raises
        ValueError for a request with a LoRA adapter, which this engine cannot load.
        """
        start_s = time.perf_counter()
        self._cache.swap_out(batch.swap_out)
        self._cache.swap_in(batch.swap_in)
        if self._spoilt_blocks:
            self._clear_spoilt(batch.chunks)
        with torch.inference_mode():
            token_ids, failed = self._run(batch.chunks) if batch.chunks else Draws({}, {})
        if self._model.device.type == "cuda":
            torch.cuda.synchronize(self._model.device)
        stopped = frozenset(
            chunk.request.request_id
            for chunk in batch.chunks
            if (token_id := token_ids.get(chunk.request.request_id)) is not None
            and self._sampler.is_last(chunk.request, token_id)
        )
        return StepResult(token_ids, stopped, time.perf_counter() - start_s, failed)

    def release(self, request_id: str) -> None:
        self._sampler.release(request_id)
        self._newest_tokens.pop(request_id, None)

    def _run(self, chunks: Sequence[ScheduledChunk]) -> Draws:
        """Run one forward pass and draw a token for each chunk that emits one."""
        for chunk in chunks:
            if chunk.request.lora_id is not None:
                raise ValueError(
                    f"request {chunk.request.request_id!r} asks for LoRA "
                    f"{chunk.request.lora_id!r}; the torch engine loads no adapters"
                )
        spans = [
            TokenSpan(chunk.num_new_tokens, chunk.num_prior_tokens, chunk.block_table)
            for chunk in chunks
        ]
        step = PagedStep(spans, self._cache, self._model.backend)
        last_rows, num_rows = [], 0
        for chunk in chunks:
            num_rows += chunk.num_new_tokens
            if chunk.emits_token:
                last_rows.append(num_rows - 1)
        device = self._model.device
        emitting = torch.tensor(last_rows, dtype=torch.long, device=device)
        logits = forward(self._model.model, self._token_ids(chunks), step, emitting)
        emitters = [chunk for chunk in chunks if chunk.emits_token]
        if not emitters:
            return Draws({}, {})
        draws = self._sampler.sample(emitters, logits)
        self._newest_tokens.update(draws.token_ids)
        for chunk in emitters if draws.failed else ():
            if chunk.request.request_id in draws.failed:
                self._spoilt_blocks.update(chunk.block_table)
        return draws

    def _clear_spoilt(self, chunks: Sequence[ScheduledChunk]) -> None:
        """Empty the spoilt blocks that this step begins to fill.

        Attention multiplies the rest of a block by zero, and 0 * NaN is NaN.
        """
        size = self._cache.block_size
        begun: set[int] = set()
        for chunk in chunks:
            stop = chunk.num_prior_tokens + chunk.num_new_tokens
            begun.update(chunk.block_table[-(-chunk.num_prior_tokens // size) : -(-stop // size)])
        blocks = self._spoilt_blocks & begun
        self._spoilt_blocks -= blocks
        self._cache.clear(sorted(blocks))

    def _token_ids(self, chunks: Sequence[ScheduledChunk]) -> Tensor:
        """Return the token ids of all chunks, [tokens]."""
        token_ids: list[int] = []
        for chunk in chunks:
            start = chunk.num_prior_tokens
            stop = start + chunk.num_new_tokens
            if chunk.request.prompt_token_ids is None:
                token_ids += [position % self._model.vocab_size for position in range(start, stop)]
            else:
                token_ids += self._known_token_ids(chunk.request, start, stop)
        return torch.tensor(token_ids, device=self._model.device)

    def _known_token_ids(self, request: Request, start: int, stop: int) -> list[int]:
        """Return tokens [start, stop) of the prompt and the output together.

        With overlap, the last one may be the newest token of the previous step, which the scheduler
        learns only while this step runs.  If that step failed, 0 takes its place: its requests have
        ended, so the result is never used.
        """
        assert request.prompt_token_ids is not None
        num_prompt = request.num_prompt_tokens
        known = list(request.prompt_token_ids[start : min(stop, num_prompt)])
        known += request.output_token_ids[max(0, start - num_prompt) : max(0, stop - num_prompt)]
        if len(known) < stop - start or known[-1] == PLACEHOLDER:
            known[stop - start - 1 :] = [self._newest_tokens.get(request.request_id, 0)]
        assert len(known) == stop - start, f"{request.request_id!r} knows no [{start}, {stop})"
        return known
