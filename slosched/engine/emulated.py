"""An executor that takes as long as a latency model predicts, in real time and without weights."""

from __future__ import annotations

import time

from slosched.core import LatencyModel, Request, ScheduledBatch, StepResult


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
        num_accepted: dict[str, int] = {}
        stopped: list[str] = []
        for chunk in batch.chunks:
            if not chunk.emits_token:
                continue
            request_id = chunk.request.request_id
            drafts = batch.drafts.get(request_id, ())
            index = chunk.num_known_outputs - len(drafts)
            token_id = _output_token(chunk.request, index)
            for draft in drafts:
                if token_id != draft or _is_stop(chunk.request, token_id, index):
                    break
                index += 1
                token_id = _output_token(chunk.request, index)
            token_ids[request_id] = token_id
            if drafts:
                num_accepted[request_id] = index - chunk.num_known_outputs + len(drafts)
            if _is_stop(chunk.request, token_id, index):
                stopped.append(request_id)
        rest_s = self._model.predict(batch.shape) - (time.monotonic() - start_s)
        if rest_s > 0:
            time.sleep(rest_s)
        elapsed_s = time.monotonic() - start_s
        return StepResult(token_ids, frozenset(stopped), elapsed_s, num_accepted=num_accepted)

    def release(self, request_id: str) -> None:
        """Do nothing: this executor keeps nothing about requests."""


def _output_token(request: Request, index: int) -> int:
    prompt = request.prompt_token_ids
    return prompt[index % len(prompt)] if prompt else 0


def _is_stop(request: Request, token_id: int, index: int) -> bool:
    sampling = request.sampling
    return token_id in sampling.stop_token_ids and index >= sampling.min_tokens
