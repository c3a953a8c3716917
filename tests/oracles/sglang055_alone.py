"""SGLang 0.5.5's scheduler without what it imports for other purposes: models, kernels, sockets.

Used by `record_sglang055.py` and `record_sglang055_hicache.py`.
"""

from __future__ import annotations

import enum
import importlib.abc
import importlib.machinery
import logging
import sys
import types
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

OTHERS = {
    *("zmq", "setproctitle", "triton", "sgl_kernel", "xgrammar", "orjson", "uvloop", "msgspec"),
    *("pybase64", "gguf", "torchao", "compressed_tensors", "decord", "flashinfer", "outlines"),
    *("interegular", "partial_json_parser", "openai_harmony", "tiktoken", "fastapi", "uvicorn"),
    *("prometheus_client", "blake3", "IPython", "torchvision", "soundfile", "psutil", "requests"),
    *("llguidance", "aiohttp", "PIL", "pynvml", "einops", "datasets", "pydantic", "cloudpickle"),
    *("huggingface_hub", "diskcache", "scipy", "openai", "anthropic", "vllm", "modelscope"),
}
OTHER_ENDS = tuple(
    f"sglang.srt.{name}"
    for name in (
        *("layers", "models", "model_executor.model_runner", "model_executor.cuda_graph_runner"),
        *("disaggregation", "speculative", "constrained", "distributed", "tokenizer", "lora"),
        *("function_call", "entrypoints", "multimodal", "compilation", "model_loader", "grpc"),
        *("managers.tp_worker", "eplb", "tracing", "metrics", "weight_sync", "connector"),
        *("parser", "configs", "utils.hf_transformers_utils", "mem_cache.hicache_storage"),
        *("mem_cache.storage", "two_batch_overlap", "server_args", "managers.io_struct"),
        *("managers.mm_utils", "managers.scheduler_profiler_mixin", "managers.cache_controller"),
        *("mem_cache.memory_pool_host", "managers.session_controller", "sampling.penaltylib"),
        "sampling.custom_logit_processor",
    )
)


class Mode(enum.Enum):
    NULL = "null"
    PREFILL = "prefill"
    DECODE = "decode"


class Anything:
    """A stand-in that takes any argument, has any attribute, and decorates without effect."""

    def __init__(self, *_args: Any, **_options: Any) -> None:
        pass

    def __call__(self, *args: Any, **_: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) else Anything()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()

    def __class_getitem__(cls, _: Any) -> Any:
        return cls

    def __or__(self, _: Any) -> Any:
        return Anything

    def __ror__(self, _: Any) -> Any:
        return Anything


class StandIn(types.ModuleType):
    """A stand-in for a module, in which every name is a class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (Anything,), {})
        setattr(self, name, made)
        return made


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a stand-in for every module that the scheduler does not need."""

    def __init__(self, wanted: Sequence[str]) -> None:
        """Find stand-ins for the modules in `OTHER_ENDS`, except those in `wanted`."""
        self.ends = [end for end in OTHER_ENDS if end not in wanted]

    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        is_other = any(name == end or name.startswith(f"{end}.") for end in self.ends)
        if name.split(".")[0] not in OTHERS and not is_other:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = StandIn(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


class Sampling:
    """A stand-in for the sampling tensors of a batch."""

    penalizer_orchestrator = SimpleNamespace(is_required=False)

    @classmethod
    def from_schedule_batch(cls, *_: Any) -> Sampling:
        return cls()

    def filter_batch(self, *_: Any) -> None:
        pass

    def merge_batch(self, _: Sampling) -> None:
        pass


class InRunningOrder(dict[Any, None]):
    """A stand-in for the `set` of requests that SGLang drives out, in the order of the batch."""

    running: Sequence[Any] = ()

    def __init__(self, items: Iterable[Any] = ()) -> None:
        given = list(items)
        if given and all(item in self.running for item in given):
            given.sort(key=self.running.index)
        super().__init__(dict.fromkeys(given))

    def add(self, item: Any) -> None:
        self[item] = None


def prepare(unpacked: Path, wanted: Sequence[str] = ()) -> SimpleNamespace:
    """Return SGLang's modules; `wanted` names modules that are loaded although a scheduler alone
    does not need them.
    """
    import torch._inductor.codecache  # before triton is replaced

    torch.compile = lambda f=None, **_: f or (lambda g: g)  # type: ignore[assignment]
    sys.meta_path.insert(0, StandIns(wanted))
    for name in ("sglang", "sglang.srt"):
        package = types.ModuleType(name)
        package.__path__ = [str(unpacked / name.replace(".", "/"))]
        sys.modules[name] = package
    logging.disable(logging.ERROR)
    names = {
        "scheduler": "managers.scheduler",
        "batch": "managers.schedule_batch",
        "policy": "managers.schedule_policy",
        "output": "managers.scheduler_output_processor_mixin",
        "radix": "mem_cache.radix_cache",
        "chunk": "mem_cache.chunk_cache",
        "allocator": "mem_cache.allocator",
        "pools": "mem_cache.memory_pool",
        "common": "mem_cache.common",
        "sampling": "sampling.sampling_params",
    }
    found = {key: importlib.import_module(f"sglang.srt.{name}") for key, name in names.items()}
    modules = SimpleNamespace(**found)
    for module in (modules.scheduler, modules.batch, modules.policy):
        module.DisaggregationMode = Mode
    modules.batch.SamplingBatchInfo = Sampling
    modules.policy.set = InRunningOrder
    modules.scheduler.require_mlp_sync = lambda _: False
    modules.common.support_triton = lambda _: False
    return modules
