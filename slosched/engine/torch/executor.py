"""TorchExecutor: runs a scheduled batch as block copies and one forward pass of a real model."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from slosched.core import PLACEHOLDER, Request, ScheduledBatch, ScheduledChunk, StepResult
from slosched.engine.torch.draws import PendingDraws, no_draws
from slosched.engine.torch.forward import forward
from slosched.engine.torch.graphs import DecodeGraphs
from slosched.engine.torch.kv_cache import PagedKVCache
from slosched.engine.torch.launched import LaunchedStep, StepTimer
from slosched.engine.torch.lora import AdapterRows
from slosched.engine.torch.mixed_graphs import MixedGraphs
from slosched.engine.torch.model import LoadedModel
from slosched.engine.torch.newest_tokens import NO_TOKENS, NewestTokens
from slosched.engine.torch.prompt_scores import (
    PendingScores,
    PromptScores,
    keeping_hidden,
    no_scores,
)
from slosched.engine.torch.sampling import Sampler, needs_tokens
from slosched.engine.torch.step_inputs import Spans, StepInput, StepInputs

_NO_DRAFTS: Mapping[str, Sequence[int]] = {}


class TorchExecutor:
    """Runs steps on a model loaded by `load_model`.

    `num_blocks`, `block_size` and `num_host_blocks` must be those of the scheduler's KV
    bookkeeping.  `seed` is for requests that sample without a seed of their own.

    Raises BackendUnavailableError if the model's attention backend does not take `block_size`.
    """

    def __init__(
        self,
        model: LoadedModel,
        *,
        num_blocks: int,
        block_size: int = 16,
        num_host_blocks: int = 0,
        seed: int = 0,
        graph_sizes: Sequence[int] = (),
        mixed_graph_sizes: Sequence[int] = (),
        most_sequences: int = 0,
    ) -> None:
        """Steps of decodes alone are padded to `graph_sizes`; see `DecodeGraphs`.

        Other steps of up to `most_sequences` are padded to `mixed_graph_sizes`; see `MixedGraphs`.
        """
        model.backend.limits.check(model.backend.name, model.geometry, block_size)
        self._model = model
        self._cache = PagedKVCache(
            model.geometry,
            # Padding writes to the last block.
            num_blocks=num_blocks + bool(graph_sizes or mixed_graph_sizes),
            block_size=block_size,
            num_host_blocks=num_host_blocks,
            device=model.device,
        )
        self._graphs = DecodeGraphs(graph_sizes, model, self._cache)
        self._mixed = MixedGraphs(mixed_graph_sizes, most_sequences, model, self._cache)
        self._inputs = StepInputs(block_size, model.device, model.window_tokens)
        self._sampler = Sampler(model.eos_token_ids, model.device, seed)
        self._prompts = PromptScores(model.model)
        self._newest = NO_TOKENS
        self._last: LaunchedStep | None = None
        """The step that was launched last."""
        self._before_last: LaunchedStep | None = None

    @property
    def mixed_graph_sizes(self) -> tuple[int, ...]:
        """Return the numbers of tokens to which steps with chunks are padded."""
        return self._mixed.sizes

    def execute(self, batch: ScheduledBatch) -> StepResult:
        """Launch a step and wait for it."""
        return self.launch(batch)()

    def launch(self, batch: ScheduledBatch) -> Callable[[], StepResult]:
        """Copy blocks out, on the device and in, run all chunks in one pass, sample.

        On a GPU all this is only asked for, and one earlier step may still run.  What comes back
        waits for the end of the step and returns its outcome; any thread may call it.

        A chunk whose request has no token ids (in a profiling run) gets arbitrary ones.  Raises
        ValueError for a request whose LoRA adapter is not loaded.
        """
        if self._before_last is not None:
            self._before_last.settle()  # its buffers are filled anew
        timer = StepTimer(self._model.device)
        self._cache.swap_out(batch.swap_out)
        self._cache.copy(batch.device_copies)
        self._cache.swap_in(batch.swap_in)
        self._cache.clear(begun_blocks(batch.chunks, self._cache.block_size))
        with torch.inference_mode():
            draws, told = self._run(batch)
        if batch.swap_out:
            self._cache.hold_computation()  # they ran beside this step, and belong to its time
        timer.end()
        step = LaunchedStep(partial(self._collect, timer, draws, told))
        self._before_last, self._last = self._last, step
        return step.result

    def _collect(
        self, timer: StepTimer, pending: PendingDraws | None, told: PendingScores
    ) -> StepResult:
        """Wait for a step and return what came of it."""
        draws = no_draws() if pending is None else pending.wait()
        elapsed_s = timer.wait()
        stopped = []
        for chunk in () if pending is None else pending.chunks:
            name = chunk.request.request_id
            token_id = draws.token_ids.get(name)
            if token_id is not None and self._sampler.is_last(chunk.request, token_id):
                stopped.append(name)
        return StepResult(
            draws.token_ids,
            frozenset(stopped),
            elapsed_s,
            draws.failed,
            draws.barred,
            draws.logprobs,
            told(),
            draws.num_accepted,
        )

    def release(self, request_id: str) -> None:
        self._inputs.release(request_id)
        self._sampler.release(request_id)
        self._prompts.release(request_id)

    def prepare(
        self,
        chunks: Sequence[ScheduledChunk],
        drafts: Mapping[str, Sequence[int]] = _NO_DRAFTS,
        num_idle: int = 0,
    ) -> StepInput:
        """Return the input of the forward pass over `chunks`; the next call but one overwrites it.

        The last tokens of a chunk are the `drafts` of its request, if it has any.  Behind the
        chunks come `num_idle` idle decodes.
        """
        requests, num_new_tokens, num_prior_tokens, _, tables = zip(*chunks, strict=True)
        names: list[Hashable] = [request.request_id for request in requests]
        spans = Spans(num_new_tokens, num_prior_tokens, tables)
        token_ids: list[int] = []
        emitting: list[int] = []
        unknown: dict[str, int] = {}
        for request, num_new, num_prior, emits_token, _ in chunks:
            verified = drafts.get(request.request_id, ()) if drafts else ()
            place = num_prior - request.num_prompt_tokens
            newest = request.output_token_ids[place:] if num_new == 1 and place >= 0 else None
            if newest and newest[0] != PLACEHOLDER:
                token_ids.append(newest[0])  # a decode: what is below, but in half the time
            elif not self._append_tokens(
                token_ids, request, num_prior, num_prior + num_new - len(verified)
            ):
                unknown[request.request_id] = len(token_ids) - 1
            if emits_token:
                emitting.append(len(token_ids) - 1)
            for token_id in verified:
                emitting.append(len(token_ids))
                token_ids.append(token_id)
        if num_idle:
            names += range(num_idle)
            spans = spans.padded(num_idle, self._graphs.idle_block)
            emitting += range(len(token_ids), len(token_ids) + num_idle)
            token_ids += [0] * num_idle
        return self._inputs.fill(names, spans, token_ids, emitting, self._newest.taken(unknown))

    def _run(self, batch: ScheduledBatch) -> tuple[PendingDraws | None, PendingScores]:
        """Run one forward pass, if there are chunks, and draw a token for each that emits one."""
        chunks = batch.chunks
        if not chunks:
            return None, no_scores
        logits, told = self._logits(batch)
        emitters = [chunk for chunk in chunks if chunk.emits_token]
        if not emitters:
            return None, told
        if self._last is not None and any(needs_tokens(chunk.request) for chunk in emitters):
            self._last.settle()
        draws = self._sampler.launch(emitters, logits, batch.drafts)
        if not batch.drafts:
            self._newest = NewestTokens.of(emitters, draws.tokens)
        return draws, told

    def _logits(self, batch: ScheduledBatch) -> tuple[Tensor, PendingScores]:
        """Run the forward pass of a batch that has chunks.

        Returns the logits of those that emit, and what is told of the prompts in it.
        """
        num_idle = self._graphs.num_idle(batch)
        step_input = self.prepare(batch.chunks, batch.drafts, num_idle or 0)
        self._newest = NO_TOKENS
        if num_idle is not None:
            return self._graphs.run(step_input)[: len(batch.chunks)], no_scores
        spans = self._prompts.spans(batch.chunks)
        size = None if spans else self._mixed.size_for(batch)
        if size is not None:
            return self._mixed.run(step_input, size), no_scores
        model, of_decoder = self._model.model, list[Any]()
        with self._adapted(batch.chunks), keeping_hidden(model, of_decoder if spans else None):
            logits = forward(model, step_input, self._cache, self._model.backend)
        return logits, self._prompts.launch(spans, of_decoder[0]) if spans else no_scores

    def _adapted(self, chunks: Sequence[ScheduledChunk]) -> AbstractContextManager[None]:
        """Return the context in which the model's layers apply the adapters of these chunks."""
        if all(chunk.request.lora_id is None for chunk in chunks):
            return nullcontext()
        return AdapterRows(chunks, self._model.device).applied(self._model.adapter_targets)

    def _append_tokens(self, token_ids: list[int], request: Request, start: int, stop: int) -> bool:
        """Append tokens [start, stop) of the prompt and the output; tell whether all are known.

        With overlap, the last one may be the newest token of the previous step, which the scheduler
        learns only while this step runs.  Then 0 takes its place.
        """
        prompt, num_prompt = request.prompt_token_ids, request.num_prompt_tokens
        if prompt is None:
            vocab_size = self._model.vocab_size
            token_ids += [position % vocab_size for position in range(start, stop)]
            return True
        wanted = len(token_ids) + stop - start
        if start < num_prompt:
            token_ids += prompt[start:stop]
            start = num_prompt
        if start < stop:
            token_ids += request.output_token_ids[start - num_prompt : stop - num_prompt]
            if len(token_ids) < wanted or token_ids[-1] == PLACEHOLDER:
                token_ids[wanted - 1 :] = [0]
                assert len(token_ids) == wanted, _unknown(request, stop)
                return False
        assert len(token_ids) == wanted, _unknown(request, stop)
        return True


def _unknown(request: Request, stop: int) -> str:
    return f"{request.request_id!r} does not know its first {stop} tokens"


def begun_blocks(chunks: Sequence[ScheduledChunk], block_size: int) -> list[int]:
    """Return the blocks to clear before these chunks run: those that they begin and do not fill.

    Attention multiplies the rest of such a block by zero, and 0 * NaN is NaN.  What is left there
    may not be numbers, if it is from a request whose logits were not.  Nobody can tell beforehand:
    the request may have ended or have been preempted before its logits were known.
    """
    begun = []
    for _, num_new, num_prior, _, table in chunks:
        num_filled, num_last_tokens = divmod(num_prior + num_new, block_size)
        if num_last_tokens and num_filled * block_size >= num_prior:
            begun.append(table[num_filled])
    return begun
