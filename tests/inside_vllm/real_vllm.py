"""vLLM's own scheduler classes with a stand-in for the model: everything up to the runner is real."""

from __future__ import annotations

import json
import random
import tempfile
from collections import deque
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

STOP_TOKEN = 3
VOCABULARY = 50_000


@dataclass(frozen=True)
class Arrival:
    call: int
    """The call of `Loop.step` before which the request arrives."""
    request_id: str
    prompt: tuple[int, ...]
    max_tokens: int
    extra_args: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class Workload:
    seed: int
    arrivals: tuple[Arrival, ...]
    num_blocks: int
    block_size: int
    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    stop_chance: float


def random_workload(seed: int, *, shares_prefixes: bool = False) -> Workload:
    """Return a workload whose engine runs out of tokens, seats and blocks."""
    rng = random.Random(seed)
    block_size = rng.choice([4, 8, 16])
    max_model_len = block_size * rng.choice([6, 10, 16])
    arrivals = []
    for index in range(rng.randint(3, 14)):
        length = rng.randint(1, max_model_len - 2)
        shared = rng.choice([0, 8, 16, 24]) if shares_prefixes else 0
        family = rng.randint(1, 2)
        prompt = tuple(
            100 * family + i if i < shared else 1000 * (index + 1) + i for i in range(length)
        )
        arrivals.append(
            Arrival(
                call=rng.choice([0, 0, rng.randint(0, 30)]),
                request_id=f"r{index}",
                prompt=prompt,
                max_tokens=rng.randint(1, 24),
            )
        )
    longest = -(-max_model_len // block_size)
    return Workload(
        seed=seed,
        arrivals=tuple(sorted(arrivals, key=lambda arrival: arrival.call)),
        num_blocks=longest + 1 + rng.choice([1, longest // 2, longest, 4 * longest]),
        block_size=block_size,
        max_num_batched_tokens=rng.choice([8, 16, 32, 64, 256]),
        max_num_seqs=rng.choice([2, 4, 8]),
        max_model_len=max_model_len,
        stop_chance=rng.choice([0.0, 0.0, 0.05]),
    )


@cache
def model_dir() -> str:
    """Return the folder of a model's description, without weights or tokenizer."""
    directory = Path(tempfile.mkdtemp(prefix="slosched-vllm-"))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "num_hidden_layers": 2,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 8192,
        "torch_dtype": "float32",
    }
    (directory / "config.json").write_text(json.dumps(config))
    return str(directory)


def make_config(
    workload: Workload,
    *,
    is_async: bool = False,
    caches_prefixes: bool = False,
    settings: dict[str, Any] | None = None,
    **scheduler_options: Any,
) -> VllmConfig:
    config = VllmConfig(
        model_config=ModelConfig(
            model=model_dir(),
            skip_tokenizer_init=True,
            dtype="float32",
            max_model_len=workload.max_model_len,
        ),
        cache_config=CacheConfig(
            block_size=workload.block_size, enable_prefix_caching=caches_prefixes
        ),
        parallel_config=ParallelConfig(),
        scheduler_config=SchedulerConfig(
            max_num_batched_tokens=workload.max_num_batched_tokens,
            max_num_seqs=workload.max_num_seqs,
            max_model_len=workload.max_model_len,
            is_encoder_decoder=False,
            **{"enable_chunked_prefill": True, **scheduler_options},
        ),
        device_config=DeviceConfig("cpu"),
        additional_config={} if settings is None else {"slosched": settings},
    )
    # The CPU platform switches it off, though the scheduler and its loop work there, too.
    config.scheduler_config.async_scheduling = is_async
    config.cache_config.num_gpu_blocks = workload.num_blocks
    return config


@dataclass(frozen=True)
class Layers:
    """A model's groups of layers, which take blocks from one pool."""

    num_full: int = 1
    windows: tuple[int, ...] = ()
    """The sliding windows, in tokens, of further groups."""
    num_states: int = 0
    """The number of further groups that keep a state of one size, as Mamba does."""
    num_blocks_more: int = 0
    """Blocks that the groups share beside their own."""

    def specs(self, block_size: int, max_model_len: int) -> list[Any]:
        """Return vLLM's descriptions of the groups."""
        shape = {
            "block_size": block_size,
            "num_kv_heads": 1,
            "head_size": 1,
            "dtype": torch.float32,
        }
        state = MambaSpec(
            block_size=-(-max_model_len // block_size) * block_size,
            shapes=((1, 1),),
            dtypes=(torch.float32,),
        )
        return [
            *[FullAttentionSpec(**shape)] * self.num_full,
            *(SlidingWindowSpec(**shape, sliding_window=window) for window in self.windows),
            *[state] * self.num_states,
        ]


def make_scheduler(scheduler_class: Any, config: VllmConfig, layers: Layers = Layers()) -> Any:
    """Return a scheduler whose pool has the workload's blocks for each group of full attention.

    For a group with a window it has as many as one request holds at once, and four for a state.
    """
    specs = layers.specs(config.cache_config.block_size, config.model_config.max_model_len)
    num_blocks = layers.num_blocks_more
    for spec in specs:
        most = config.cache_config.num_gpu_blocks
        if isinstance(spec, SlidingWindowSpec):
            most = min(
                most,
                spec.max_admission_blocks_per_request(
                    config.max_in_flight_tokens, config.model_config.max_model_len
                ),
            )
        num_blocks += min(most, 4) if isinstance(spec, MambaSpec) else most
    return scheduler_class(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=num_blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[
                KVCacheGroupSpec([f"layer{index}"], spec) for index, spec in enumerate(specs)
            ],
        ),
        structured_output_manager=StructuredOutputManager(config),
        block_size=max(spec.block_size for spec in specs),
        log_stats=True,
    )


def make_request(arrival: Arrival, block_size: int, arrival_s: float) -> Request:
    init_none_hash(sha256)
    return Request(
        request_id=arrival.request_id,
        prompt_token_ids=list(arrival.prompt),
        sampling_params=SamplingParams(
            max_tokens=arrival.max_tokens,
            stop_token_ids=[STOP_TOKEN],
            extra_args=dict(arrival.extra_args) or None,
        ),
        pooling_params=None,
        arrival_time=arrival_s,
        block_hasher=get_request_block_hasher(block_size, sha256),
    )


@dataclass
class Step:
    """The plan of one call, and the queues after it."""

    scheduled: list[tuple[str, int]]
    preempted: list[str]
    running: list[str]
    waiting: list[str]
    holding: list[str]
    """Requests that wait and hold blocks, into which a KV connector loads."""
    num_free_blocks: int
    outputs: list[tuple[str, tuple[int, ...], str | None, Any]]
    """Request, tokens, finish reason, stop reason."""


@dataclass
class Loop:
    """vLLM's engine loop without an engine: synchronous, or with a batch queue of two."""

    scheduler: Any
    workload: Workload
    is_async: bool
    arrival_s: float = 0.0
    num_calls: int = 0
    _queue: deque[tuple[Any, list[str]]] = field(default_factory=deque)

    def run(self, max_calls: int = 3000) -> list[Step]:
        arrivals = deque(self.workload.arrivals)
        steps = []
        while arrivals or self._queue or self.scheduler.has_requests():
            while arrivals and arrivals[0].call <= self.num_calls:
                arrival = arrivals.popleft()
                self.scheduler.add_request(
                    make_request(arrival, self.workload.block_size, self.arrival_s)
                )
            steps.append(self.step())
            assert self.num_calls < max_calls, f"seed {self.workload.seed} never ends"
        return steps

    def step(self) -> Step:
        self.num_calls += 1
        scheduler, output = self.scheduler, None
        if scheduler.has_requests():
            output = scheduler.schedule()
            emitting = [
                name
                for name in output.num_scheduled_tokens
                if not scheduler.requests[name].is_prefill_chunk
            ]
            self._queue.append((output, emitting))
        outputs: list[Any] = []
        # As in vLLM, a plan without tokens waits in the queue, too.
        may_go_on = output is not None and (
            output.total_num_scheduled_tokens > 0 or scheduler.has_requests()
        )
        must_wait = not self.is_async or len(self._queue) > 1 or not may_go_on
        if self._queue and must_wait:
            outputs = self._returned(*self._queue.popleft())
        return Step(
            scheduled=[] if output is None else list(output.num_scheduled_tokens.items()),
            preempted=sorted([] if output is None else output.preempted_req_ids),
            running=[request.request_id for request in scheduler.running],
            waiting=[request.request_id for request in scheduler.waiting],
            holding=[request.request_id for request in scheduler.kv_holding_waiting],
            num_free_blocks=scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
            outputs=outputs,
        )

    def _returned(self, output: Any, emitting: list[str]) -> list[Any]:
        names = list(output.num_scheduled_tokens)
        runner_output = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=[
                self._tokens(name, output) if name in emitting else [] for name in names
            ],
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        )
        connector = self.scheduler.connector
        for each in getattr(connector, "sub_connectors", [connector]):
            if hasattr(each, "transferred"):  # at most one of them
                runner_output.kv_connector_output = each.transferred()
        told = self.scheduler.update_from_output(output, runner_output)
        return sorted(
            (each.request_id, tuple(each.new_token_ids), each.finish_reason, each.stop_reason)
            for client in told.values()
            for each in client.outputs
        )

    def _tokens(self, request_id: str, output: Any) -> list[int]:  # for subclasses
        """Return the tokens that a step samples for a request."""
        return [self._token(request_id, self._place(request_id))]

    def _place(self, request_id: str) -> int:
        """Return the number of tokens that the request has answered."""
        request = self.scheduler.requests.get(request_id)
        return 0 if request is None else int(request.num_output_tokens)

    def _token(self, request_id: str, place: int) -> int:
        """Return a token that depends only on the request and its position, not on the scheduling."""
        chance = random.Random(f"{self.workload.seed} {request_id} {place}")
        if chance.random() < self.workload.stop_chance:
            return STOP_TOKEN
        return chance.randint(10, VOCABULARY - 1)
