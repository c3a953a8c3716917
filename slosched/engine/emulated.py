"""An executor that takes as long as a latency model predicts, in real time and without weights."""

from __future__ import annotations

import time

from slosched.core import LatencyModel, ScheduledBatch, ScheduledChunk, StepResult


class EmulatedExecutor:
    """Sleeps each step's predicted time, so that a server behaves as if it ran on that device.

    The "model" repeats the prompt endlessly: token i of the output is token i of the prompt, modulo
    the prompt's length (0 if the prompt has no token ids).  Only a request's own stop token ids end
    it early.  All others run to their limit, since there is no end-of-sequence token.
    """

    def __init__(self, model: LatencyModel) -> None:
        self._model = model

    def execute(self, batch: ScheduledBatch) -> StepResult:
        start_s = time.monotonic()
        token_ids: dict[str, int] = {}
        stopped: list[str] = []
        for chunk in batch.chunks:
            if chunk.emits_token:
                request_id = chunk.request.request_id
                token_id = token_ids[request_id] = _next_token(chunk)
                if _is_stop(chunk, token_id):
                    stopped.append(request_id)
        rest_s = self._model.predict(batch.shape) - (time.monotonic() - start_s)
        if rest_s > 0:
            time.sleep(rest_s)
        return StepResult(token_ids, frozenset(stopped), time.monotonic() - start_s)

    def release(self, request_id: str) -> None:
        """Do nothing: this executor keeps nothing about requests."""


def _next_token(chunk: ScheduledChunk) -> int:
    prompt = chunk.request.prompt_token_ids
    return prompt[chunk.num_known_outputs % len(prompt)] if prompt else 0


def _is_stop(chunk: ScheduledChunk, token_id: int) -> bool:
    sampling = chunk.request.sampling
    return token_id in sampling.stop_token_ids and chunk.num_known_outputs >= sampling.min_tokens
