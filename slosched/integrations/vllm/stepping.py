"""vLLM's engine, driven step by step: each planned batch is one step of its own core.

The requests of a batch pretend to have computed their prior tokens. vLLM gives them blocks and runs
its model over whatever those contain, which takes as long as with real content.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any

from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.abstract import Executor as VLLMExecutor

from slosched.core import ScheduledBatch, ScheduledChunk, StepResult
from slosched.integrations.vllm.hooks import check_class
from slosched.integrations.vllm.record import device_name, provenance

_FIRST_TOKEN, _NUM_TOKENS = 100, 900
"""Token ids that are ordinary tokens in every vocabulary."""


@dataclass(frozen=True)
class EngineOptions:
    """The options with which vLLM is started; vLLM chooses what is left out."""

    model: str
    max_num_batched_tokens: int
    max_num_seqs: int
    kv_tokens: int | None = None
    block_size: int | None = None
    dtype: str = "auto"
    load_format: str = "auto"
    others: tuple[str, ...] = ()
    """Any options of `vllm serve`, as words of a command line."""

    def config(self) -> Any:
        """Return a `VllmConfig`; an option that vLLM does not know ends the process, as in vLLM."""
        parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
        # The words include the model because vLLM looks for it, or for its default, while parsing.
        words = [*self.others, "--model", self.model]
        args = EngineArgs.from_cli_args(parser.parse_args(words))
        args.max_num_batched_tokens = self.max_num_batched_tokens
        args.max_num_seqs = self.max_num_seqs
        args.dtype = self.dtype
        args.load_format = self.load_format
        args.block_size = self.block_size or args.block_size
        args.skip_tokenizer_init = True
        args.enable_prefix_caching = False
        args.async_scheduling = False
        args.disable_log_stats = True
        args.scheduler_cls = f"{__name__}.StampingScheduler"
        config = args.create_engine_config()
        if self.kv_tokens is not None:  # plus the one block that vLLM keeps for itself
            num_blocks = self.kv_tokens // config.cache_config.block_size + 1
            config.cache_config.num_gpu_blocks_override = num_blocks
        return config


class StampingScheduler(Scheduler):  # type: ignore[misc]
    """vLLM's scheduler, which notes when it has decided; from then on, time is the device's."""

    decided_s = 0.0

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        output = super().schedule(*args, **kwargs)
        self.decided_s = time.perf_counter()
        return output


class VLLMSteps:
    """A `core.Executor` whose steps are those of a vLLM in this process."""

    def __init__(self, options: EngineOptions) -> None:
        """Load the model; raise UnsupportedVLLMError if vLLM lacks a part that is needed."""
        check_class(Scheduler)
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        config = options.config()
        self._core = EngineCore(config, VLLMExecutor.get_class(config), log_stats=False)
        self._scheduler = self._core.scheduler
        self._num_made = 0
        self.config = config

    @property
    def num_blocks(self) -> int:
        """Return the number of blocks without the one that vLLM keeps for itself."""
        return int(self._scheduler.kv_cache_manager.block_pool.num_gpu_blocks) - 1

    @property
    def block_size(self) -> int:
        return int(self.config.cache_config.block_size)

    @property
    def max_model_len(self) -> int:
        return int(self.config.model_config.max_model_len)

    def provenance(self) -> dict[str, str]:
        """Return the facts that describe measurements on this engine."""
        return provenance(self.config, device_name(), self.num_blocks)

    def execute(self, batch: ScheduledBatch) -> StepResult:
        """Run the batch in one step; raise ValueError if it copies blocks, which vLLM cannot do."""
        if batch.swap_in or batch.swap_out:
            raise ValueError("vLLM swaps no blocks: plan batches without copies")
        for chunk in batch.chunks:
            self._core.add_request(self._request(chunk))
        outputs, _ = self._core.step()
        seconds = time.perf_counter() - self._scheduler.decided_s
        tokens = [output for each in outputs.values() for output in each.outputs]
        if len(tokens) != len(batch.chunks) or self._scheduler.has_unfinished_requests():
            raise RuntimeError(
                f"vLLM ran {len(tokens)} of the {len(batch.chunks)} requests of a planned batch in "
                "its step: the plan does not fit its limits"
            )
        names = [chunk.request.request_id for chunk in batch.chunks]
        return StepResult(dict.fromkeys(names, 0), frozenset(names), seconds)

    def release(self, request_id: str) -> None:
        """Do nothing: each request ends with its step."""

    def close(self) -> None:
        """Shut vLLM's engine down and free the device."""
        self._core.shutdown()

    def _request(self, chunk: ScheduledChunk) -> Any:
        self._num_made += 1
        num_tokens = chunk.num_prior_tokens + chunk.num_new_tokens
        made = EngineCoreRequest(
            request_id=f"step-{self._num_made}",
            prompt_token_ids=[_FIRST_TOKEN + i % _NUM_TOKENS for i in range(num_tokens)],
            mm_features=None,
            sampling_params=SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True),
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        request, _ = self._core.preprocess_add_request(made)
        request.num_computed_tokens = chunk.num_prior_tokens
        return request
