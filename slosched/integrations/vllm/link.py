"""The part of a step inside vLLM that is the same whoever decides it: mirror, time, learn."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from vllm.v1.core.sched.interface import PauseState

from slosched.core import BatchShape, EndReason, LatencyModel, Policy
from slosched.integrations.vllm.enact import Caps
from slosched.integrations.vllm.kv_view import VLLMBlocks
from slosched.integrations.vllm.limits import limits_of
from slosched.integrations.vllm.metrics import counter
from slosched.integrations.vllm.mirror import Mirror
from slosched.integrations.vllm.quotes import Teller
from slosched.integrations.vllm.settings import Settings
from slosched.integrations.vllm.steps import Record, StepTimes
from slosched.integrations.vllm.truth import Truth
from slosched.perfmodel import OnlineModel
from slosched.perfmodel.measurement import Chunk
from slosched.policy.offer import Occupancy

logger = logging.getLogger("vllm.slosched")


class Link(ABC):
    """The link between vLLM's scheduler `host` and slosched.  A subclass writes `_run`."""

    def __init__(
        self, host: Any, settings: Settings, device: str, record: Record | None = None
    ) -> None:
        self._host = host
        self._kv = VLLMBlocks(host.kv_cache_manager, host.requests)
        self._limits = limits_of(host, settings.deadline_rule, self._kv.groups.num_blocks_per_row)
        parallel = host.vllm_config.parallel_config
        names = _names(host.vllm_config.model_config)
        fitted = settings.make_model(device, names, parallel.world_size)
        self._model: LatencyModel | None = None if fitted is None else OnlineModel(fitted)
        per_request_s = 0.0 if fitted is None else fitted.server_time.per_request_s
        promises = settings.make_promises()
        self._teller = Teller(
            self._model, names[0], promises, per_request_s, settings.deadline_rule
        )
        self._mirror = Mirror(host, self._kv, promises, self._limits, per_request_s)
        self._steps = StepTimes(self._model, record)
        self.caps = Caps()
        self.truth = Truth(
            counter(parallel.data_parallel_index), self._limits.max_num_batched_tokens
        )
        logger.info(
            "slosched: policy %s, latency model %s, %d tokens and %d requests a step, %d KV blocks",
            settings.policy,
            settings.profile or settings.emulate or "none",
            self._limits.max_num_batched_tokens,
            self._limits.max_num_seqs,
            self._kv.num_blocks,
        )

    def schedule(self, vllm_schedule: Callable[[], Any]) -> Any:
        """Return vLLM's `SchedulerOutput` of one step."""
        now_s = time.time()
        begins_s = self._steps.next_begins_s(now_s)
        self._mirror.note_ends(self._host.finished_req_ids, now_s)
        if self._host.pause_state is PauseState.UNPAUSED:
            self._mirror.withheld.clear()
            self._mirror.refresh(begins_s)
            output, shape = self._run(begins_s, vllm_schedule)
        else:
            output, shape = self._leave_to_vllm(vllm_schedule), None
        num_tokens = output.total_num_scheduled_tokens
        self._steps.launched(num_tokens, self._chunks(output), time.time(), shape)
        return output

    def returned(self, scheduler_output: Any, outputs: dict[int, Any]) -> None:  # noqa: ARG002
        """Handle a step whose results vLLM has just processed; `outputs` go to the clients."""
        now_s = time.time()
        self._steps.returned(now_s)
        self._mirror.note_tokens(scheduler_output.num_scheduled_tokens, now_s)

    def answered(self, request_id: str) -> None:
        """Stamp the last token of a session's answer, which its next input may take out of it."""
        self._mirror.note_tokens((request_id,), time.time())

    def await_input(self, request_id: str) -> None:
        """Let a session that has answered end; with its next input, it is a new request.

        That has another prompt, another output limit and perhaps another SLO.
        """
        self._mirror.note_ends((request_id,), time.time(), EndReason.STOP)

    def quotes(
        self, lengths_tokens: Sequence[int], asked: Mapping[str, object]
    ) -> dict[str, object]:
        """Return what prompts of these lengths would be promised now, as GET /v1/quote does.

        `asked` has the fields of `vllm_xargs` that say what is to be promised.  The answer is
        an `error` if nobody can say, as where vLLM itself decides.
        """
        num_running, num_waiting = self._host.get_request_counts()
        occupancy = Occupancy(num_running, num_waiting, self._host.kv_cache_manager.usage)
        return self._teller.quotes(self._deciding, lengths_tokens, asked, occupancy)

    @property
    def _deciding(self) -> Policy | None:
        """Return the policy whose plans vLLM carries out; None if vLLM decides."""
        return None

    @abstractmethod
    def _run(
        self, begins_s: float, vllm_schedule: Callable[[], Any]
    ) -> tuple[Any, BatchShape | None]:
        """Return vLLM's output of a step, and the batch's shape if it is known.

        The mirror shows the queues as they will be when the step begins, at `begins_s`.
        """

    def _leave_to_vllm(self, vllm_schedule: Callable[[], Any]) -> Any:
        """Return vLLM's output of a step that goes by its own order."""
        return vllm_schedule()

    def _chunks(self, output: Any) -> Iterator[Chunk]:
        """Yield the chunks of a step as vLLM executes it, draft tokens included."""
        requests = self._host.requests
        for request_id, n in output.num_scheduled_tokens.items():
            yield n, requests[request_id].num_computed_tokens - n


def _names(model: Any) -> list[str]:
    """Return the names of the served model: those that clients use, and where it comes from."""
    served = model.served_model_name
    names = served if isinstance(served, list) else [served]
    return [*(name for name in names if name), str(model.model)]
