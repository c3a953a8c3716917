"""A trace played to vLLM's engine core in this process, in real time or in virtual time.

    with warped():
        core = emulated_core(model, ["--max-model-len", "16384"], {"emulate": "h100/llama-3.1-8b"})
        records = play(core, trace)

The engine core, its scheduler and its KV cache manager are vLLM's own.  There is no API server: a
request is in the engine when it arrives, and a token is with the client when its step ends.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine import EngineCoreRequest, FinishReason
from vllm.v1.engine.core import EngineCore

from slosched.core import EndReason, OnInfeasible, RequestStatus, SloschedError
from slosched.integrations.vllm.executor import EmulatedExecutor
from slosched.integrations.vllm.slo import INVALID
from slosched.metrics import RequestRecord
from slosched.replay.prompts import plain_prompt
from slosched.workload.http_slo import ON_INFEASIBLE_FIELD, PROMISES, REJECTED
from slosched.workload.trace import Trace, TraceRequest

_YIELD_S = 0.001
"""The pause of vLLM's loop after a step that ran nothing although there are requests."""


class LostRequestError(SloschedError):
    """vLLM ended a request in a way that a trace does not expect."""


def emulated_core(model: Path, options: Sequence[str], settings: Mapping[str, Any]) -> Any:
    """Return an `EngineCore` of vLLM on an emulated device.

    `options` are words of `vllm serve`, and `settings` the `slosched` part of its additional
    config, which has to name the device (`emulate`).  An option that vLLM does not know ends the
    process, as in vLLM.
    """
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    args = EngineArgs.from_cli_args(parser.parse_args([*options, "--model", str(model)]))
    args.distributed_executor_backend = EmulatedExecutor
    args.additional_config = {"slosched": dict(settings)}
    args.skip_tokenizer_init = True
    args.disable_log_stats = True
    return EngineCore(args.create_engine_config(), EmulatedExecutor, log_stats=False)


def play(core: Any, trace: Trace) -> list[RequestRecord]:
    """Play `trace` to an idle engine core and return a record of each request, in its order.

    Times count from the start of the trace.  The loop is that of vLLM's engine process: it admits
    what has arrived, makes a step, and sleeps where vLLM does or until the next arrival.

    Raises LostRequestError if a request ends otherwise than with its last token or a rejection,
    and ValueError if a request wants several answers or a LoRA adapter.
    """
    _check(trace)
    start_s = time.monotonic()
    to_come = sorted(enumerate(trace.requests), key=lambda pair: pair[1].arrival_s, reverse=True)
    followed: dict[str, _Followed] = {}
    while to_come or core.scheduler.has_requests() or core.batch_queue:
        while to_come and start_s + to_come[-1][1].arrival_s <= time.monotonic():
            index, request = to_come.pop()
            followed[request.request_id] = _Followed(request)
            _add(core, request, index, start_s + request.arrival_s)
        if core.scheduler.has_requests() or core.batch_queue:
            _step(core, followed, start_s)
        elif to_come:
            time.sleep(max(0.0, start_s + to_come[-1][1].arrival_s - time.monotonic()))
    return [followed[request.request_id].record() for request in trace.requests]


def _step(core: Any, followed: Mapping[str, _Followed], start_s: float) -> None:
    """Make one step of vLLM's engine core, and note what clients get from it."""
    outputs, has_executed = core.step_fn()
    core.post_step(has_executed)
    now_s = time.monotonic() - start_s
    for client in (outputs or {}).values():
        for output in client.outputs:
            followed[output.request_id].note(output, now_s)
    if not has_executed and core.scheduler.has_requests():
        time.sleep(_YIELD_S)


def _check(trace: Trace) -> None:
    for request in trace.requests:
        if request.n > 1 or request.lora_id is not None:
            raise ValueError(
                f"request {request.request_id!r} of the trace wants several answers or a LoRA "
                "adapter, which are not played in process: leave out the columns n and lora_id"
            )


def _add(core: Any, request: TraceRequest, index: int, arrival_s: float) -> None:
    made = EngineCoreRequest(
        request_id=request.request_id,
        prompt_token_ids=plain_prompt(request.num_prompt_tokens, index),
        mm_features=None,
        sampling_params=SamplingParams(
            max_tokens=request.num_output_tokens,
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            extra_args=_promises(request) or None,
        ),
        pooling_params=None,
        # vLLM's time of an arrival is of `time.time`, the start of the trace of `time.monotonic`.
        arrival_time=arrival_s + time.time() - time.monotonic(),
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
        priority=request.priority,
    )
    core.add_request(*core.preprocess_add_request(made))


def _promises(request: TraceRequest) -> dict[str, float | str]:
    """Return the request's SLO, in milliseconds, and its `on_infeasible` as its `vllm_xargs`."""
    times_s = (request.slo.ttft_s, request.slo.tpot_s, request.slo.e2e_s)
    promises: dict[str, float | str] = {
        names.field: 1000 * time_s
        for names, time_s in zip(PROMISES, times_s, strict=True)
        if time_s is not None and time_s < math.inf
    }
    if request.on_infeasible is not OnInfeasible.REJECT:
        promises[ON_INFEASIBLE_FIELD] = request.on_infeasible.value
    return promises


@dataclass(slots=True)
class _Followed:
    """What a client has got of its request so far."""

    request: TraceRequest
    token_times_s: list[float] = field(default_factory=list)
    end_s: float | None = None
    status: RequestStatus = RequestStatus.WAITING
    end_reason: EndReason | None = None

    def note(self, output: Any, now_s: float) -> None:
        self.token_times_s.extend([now_s] * len(output.new_token_ids))
        if output.finish_reason is None:
            return
        self.end_s = now_s
        why = str(output.stop_reason or "")
        if output.finish_reason is FinishReason.LENGTH:
            self.status, self.end_reason = RequestStatus.FINISHED, EndReason.LENGTH
        elif why.startswith(REJECTED):
            reason = why.removeprefix(f"{REJECTED}:").partition(";")[0]
            self.status, self.end_reason = RequestStatus.REJECTED, EndReason(reason)
        else:
            what = "its SLO is refused" if why.startswith(INVALID) else "vLLM gives no reason"
            raise LostRequestError(
                f"request {self.request.request_id!r} ended as {output.finish_reason} after "
                f"{len(self.token_times_s)} tokens: {why or what}"
            )

    def record(self) -> RequestRecord:
        request = self.request
        return RequestRecord(
            request_id=request.request_id,
            arrival_s=request.arrival_s,
            num_prompt_tokens=request.num_prompt_tokens,
            num_output_tokens=len(self.token_times_s),
            slo=request.slo,
            status=self.status,
            end_reason=self.end_reason,
            token_times_s=tuple(self.token_times_s),
            end_s=self.end_s,
            priority=request.priority,
            tier=request.tier,
            tenant=request.tenant,
        )
