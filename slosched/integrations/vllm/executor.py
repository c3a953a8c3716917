"""An emulated device for real vLLM: steps take as long as a latency model says, without weights.

    vllm serve MODEL --distributed-executor-backend slosched.integrations.vllm.EmulatedExecutor \
        --additional-config '{"slosched": {"emulate": "h100/llama-3.1-8b"}}'

The API server, engine core, scheduler and KV cache manager are vLLM's own.

The latency model predicts for all devices together on which it was measured with tensor
parallelism.  In a pipeline, each stage takes an equal share of a step's time, and a step enters as
soon as the first stage is free.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput

from slosched.core import BatchShape
from slosched.integrations.vllm.settings import SettingsError, read_settings
from slosched.perfmodel.device import num_devices


@dataclass(slots=True)
class _Sequence:
    """A request in the "model", which repeats the prompt without its end-of-text tokens."""

    prompt: list[int]
    num_prompt_tokens: int
    num_emitted: int = 0

    def next_token(self) -> int:
        token = self.prompt[self.num_emitted % len(self.prompt)] if self.prompt else 0
        self.num_emitted += 1
        return token


class EmulatedExecutor(Executor):  # type: ignore[misc]
    """An executor whose steps take their predicted time and start when their stage is free."""

    supports_pp = True
    """vLLM reads this from a class.  For an executor given by name, it assumes False."""

    def _init_executor(self) -> None:
        settings = read_settings(self.vllm_config.additional_config)
        device = settings.make_device()
        if device is None:
            raise SettingsError(
                "EmulatedExecutor needs a device: name a latency model as slosched.emulate in "
                "--additional-config (`slosched profile --list` shows the bundled ones)"
            )
        if self.speculative_config is not None:
            raise SettingsError("EmulatedExecutor drafts no tokens: leave out --speculative-config")
        asked, measured = self.parallel_config.tensor_parallel_size, num_devices(device)
        if asked not in (1, measured):
            raise SettingsError(
                f"slosched.emulate {settings.emulate!r} was measured on {measured} "
                f"device{'s' * (measured > 1)} and does not say what {asked} would take: leave out "
                "--tensor-parallel-size, or name a latency model of as many"
            )
        self._model = device
        num_stages = self.parallel_config.pipeline_parallel_size
        # The CPU platform has switched it off by now, and vLLM reads it again after this.  In a
        # pipeline, vLLM plans ahead only with its second model runner, which the CPU platform
        # lacks.
        self.scheduler_config.async_scheduling = settings.emulate_async and num_stages == 1
        self._sequences: dict[str, _Sequence] = {}
        self._ends_of_text = _as_set(getattr(self.model_config.hf_config, "eos_token_id", None))
        self._free_s = [0.0] * num_stages
        """The time at which each stage will have finished its work."""
        self._step: tuple[ModelRunnerOutput, float] = (EMPTY_MODEL_RUNNER_OUTPUT, 0.0)
        """The output of `execute_model` and the time when it is ready; `sample_tokens` returns it.
        """
        self._answers: dict[str, Callable[[], Any]] = {
            "get_kv_cache_spec": self._kv_cache_spec,
            "determine_available_memory": self._kv_cache_bytes,
            "get_supported_kv_cache_layouts": lambda: ["LBNHC"],
            "get_supported_tasks": lambda: ("generate",),
            "supports_draft_weight_updates": lambda: False,
        }

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        return True

    def check_health(self) -> None:
        """Do nothing: an emulated device does not fail."""

    def shutdown(self) -> None:
        """Do nothing: an emulated device holds nothing."""

    def compile_or_warm_up_model(self) -> None:
        """Do nothing: there is nothing to compile."""

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,  # noqa: ARG002  # vLLM's interface
        args: tuple[Any, ...] = (),  # noqa: ARG002
        kwargs: dict[str, Any] | None = None,  # noqa: ARG002
        non_block: bool = False,
        single_value: bool = False,
    ) -> Any:
        """Return the one worker's answer to a question of vLLM's; None for other calls."""
        answer = self._answers[method]() if method in self._answers else None
        result = answer if single_value else [answer]
        return _done(result) if non_block else result

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        """Begin a step; `sample_tokens` returns its tokens.  An empty step ends at once."""
        now_s = time.monotonic()
        for request_id in scheduler_output.finished_req_ids:
            self._sequences.pop(request_id, None)
        if not scheduler_output.total_num_scheduled_tokens:
            return _done(EMPTY_MODEL_RUNNER_OUTPUT) if non_block else EMPTY_MODEL_RUNNER_OUTPUT
        shape, output = self._run(scheduler_output)
        self._step = (output, self._ends_s(now_s, self._model.predict(shape)))
        return _NOTHING if non_block else None

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:  # noqa: ARG002
        output, ends_s = self._step
        step = _Step(output, ends_s)
        return step if non_block else step.result()

    def _ends_s(self, now_s: float, takes_s: float) -> float:
        """Return when a step that is handed over now will have gone through every stage."""
        ends_s = now_s
        for stage, free_s in enumerate(self._free_s):
            ends_s = max(ends_s, free_s) + takes_s / len(self._free_s)
            self._free_s[stage] = ends_s
        return ends_s

    def _run(self, scheduler_output: Any) -> tuple[BatchShape, ModelRunnerOutput]:
        shape = BatchShape()
        computed, sequences = self._num_computed(scheduler_output), self._sequences
        planned = scheduler_output.num_scheduled_tokens
        names = list(planned)
        tokens: list[list[int]] = []
        contexts: list[int] = []
        for name, n in planned.items():
            sequence, after = sequences[name], computed[name] + n
            if n == 1:  # Hundreds of decodes are summed up at once.
                contexts.append(after)
            else:
                shape.add(n, after - n)
            known = sequence.num_prompt_tokens + sequence.num_emitted
            tokens.append([sequence.next_token()] if after >= known else [])
        if contexts:
            shape.add_decodes(contexts)
        return shape, ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=tokens,
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        )

    def _num_computed(self, scheduler_output: Any) -> dict[str, int]:
        """Return the tokens in the KV cache before this step, by request; register new requests."""
        computed = {}
        for new in scheduler_output.scheduled_new_reqs:
            prompt = new.prompt_token_ids or []
            self._sequences.setdefault(
                new.req_id,
                _Sequence([t for t in prompt if t not in self._ends_of_text], len(prompt)),
            )
            computed[new.req_id] = new.num_computed_tokens
        cached = scheduler_output.scheduled_cached_reqs
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        return computed

    def _kv_cache_spec(self) -> dict[str, Any]:
        model, parallel = self.model_config, self.parallel_config
        spec = FullAttentionSpec(
            block_size=self.cache_config.block_size,
            num_kv_heads=model.get_num_kv_heads(parallel),
            head_size=model.get_head_size(),
            dtype=model.dtype,
        )
        return {f"layer.{index}": spec for index in range(model.get_num_layers(parallel))}

    def _kv_cache_bytes(self) -> int:
        """Return the bytes of a KV cache with as many tokens as the measured device held."""
        tokens = self._model.provenance.get("kv_capacity_tokens")
        override = self.cache_config.num_gpu_blocks_override
        if tokens is None and override is None:
            raise SettingsError(
                "the emulated device's latency model does not say what its KV cache held: "
                "give --num-gpu-blocks-override"
            )
        block_size = self.cache_config.block_size
        num_blocks = override or int(tokens or 0) // block_size
        page_bytes = sum(spec.page_size_bytes for spec in self._kv_cache_spec().values())
        return int(num_blocks * page_bytes)


class _Step(Future[Any]):
    """The output of a step, which is there at `ends_s`; whoever asks for it sleeps until then."""

    def __init__(self, output: ModelRunnerOutput, ends_s: float) -> None:
        super().__init__()
        self._ends_s = ends_s
        self.set_result(output)

    def done(self) -> bool:
        return time.monotonic() >= self._ends_s

    def result(self, timeout: float | None = None) -> Any:
        rest_s = self._ends_s - time.monotonic()
        if timeout is not None and timeout < rest_s:
            time.sleep(max(0.0, timeout))
            raise TimeoutError
        if rest_s > 0:
            time.sleep(rest_s)
        return super().result()


def _done(result: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(result)
    return future


_NOTHING = _done(None)
"""What is returned of each step's first half, in which vLLM expects no result."""


def _as_set(token_ids: int | list[int] | None) -> frozenset[int]:
    if token_ids is None:
        return frozenset()
    return frozenset([token_ids] if isinstance(token_ids, int) else token_ids)
