"""AIConfigurator's package: a model's operators, their times, and the room for its KV cache."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module, metadata
from pathlib import Path
from typing import Any, Protocol

from slosched.perfmodel.aiconfigurator.deployment import Deployment
from slosched.perfmodel.aiconfigurator.errors import (
    ConfigMissingError,
    MissingTablesError,
    NoRoomError,
)
from slosched.perfmodel.aiconfigurator.operators import OperatorEngine, OperatorTables
from slosched.perfmodel.peaks import Peaks

VERSION = "0.12.0"
"""Version of aiconfigurator-core: the last of its release line, so that the numbers do not change.
"""

_MEMORY_FRACTION = 0.9
"""What an engine takes by default: vLLM and SGLang of a GPU's memory, TensorRT-LLM of what weights
and activations leave of it."""

_REMEDY = "pip install 'slosched[aiconfigurator]'"
_CONFIG_FILES = ["config.json", "hf_quant_config.json", "generation_config.json"]


class LimitedEngine(OperatorEngine, Protocol):
    """An engine that also says how long operators take at the GPU's peaks."""

    def evaluate_ops_sol_json(
        self, ops_json: str, *, is_context: bool, batch_size: int, s: int, prefix: int = 0
    ) -> list[tuple[str, float, float, float]]:
        """Return name and milliseconds of each operator, then those of arithmetic and memory."""


@dataclass(frozen=True)
class Operator:
    """An operator as AIConfigurator describes it: {kind: settings}."""

    spec: Mapping[str, Mapping[str, Any]]

    @property
    def kind(self) -> str:
        return next(iter(self.spec))

    @property
    def settings(self) -> Mapping[str, Any]:
        return self.spec[self.kind]

    @property
    def name(self) -> str:
        return str(self.settings["name"])


@dataclass(frozen=True)
class CompiledModel:
    """A model's operators in one deployment."""

    engine: LimitedEngine
    config: str
    """The name or folder from which AIConfigurator reads the model's config.json."""
    version: str
    """The version of the engine whose kernels were measured."""
    dtypes: Mapping[str, str]
    """What weights, experts and KV cache are stored as."""
    prefill: tuple[Operator, ...]
    """The operators of a step with chunks."""
    decode: tuple[Operator, ...]
    """The operators of a step of decodes alone."""

    def tables(self) -> OperatorTables:
        """Return the operators' times, sorted by what they depend on."""
        prefill, decode = ([op.name for op in ops] for ops in (self.prefill, self.decode))
        tables = OperatorTables.of(self.engine, prefill, decode)
        kinds = {self.prefill[i].kind for i in tables.prefill_attention}
        return replace(tables, has_projections=not kinds <= {"ContextAttention"})

    def num_logits(self) -> int:
        """Return how many logits of a request each GPU computes."""
        [head] = (op for op in self.decode if "logits" in op.name)
        return int(head.settings["n"])

    def prefill_limit_s(self, index: int, num_tokens: int) -> float:
        """Return the seconds that a prefill operator takes at the GPU's peaks."""
        return self._limit_s(self.prefill[index], True, 1, num_tokens)

    def decode_limit_s(self, index: int, num_decodes: int, context_tokens: int) -> float:
        """Return the seconds that a decode operator takes at the GPU's peaks."""
        return self._limit_s(self.decode[index], False, num_decodes, context_tokens)

    def _limit_s(self, operator: Operator, is_prefill: bool, batch: int, tokens: int) -> float:
        rows = self.engine.evaluate_ops_sol_json(
            json.dumps([operator.spec]), is_context=is_prefill, batch_size=batch, s=tokens
        )
        return sum(milliseconds for _, milliseconds, _, _ in rows) / 1e3


@dataclass(frozen=True)
class KVRoom:
    """The room for the KV cache, in tokens, and what a token takes on each GPU."""

    capacity_tokens: int
    bytes_per_token: int
    memory_share: float
    """The share of the memory that weights, activations and the KV cache fill."""


def compile_model(deployment: Deployment) -> CompiledModel:
    """Compile the operators of a model, with their tables.

    Raises MissingTablesError if the package is absent or has no tables, and ConfigMissingError if
    the model's config.json cannot be had.
    """
    database, models, compiler = _sdk("sdk.perf_database"), _sdk("sdk.models"), _sdk("sdk.engine")
    config = config_folder(deployment.model)
    system, backend = deployment.system, deployment.backend
    tp, ep = deployment.tensor_parallel, deployment.expert_parallel
    try:
        version = database.resolve_query_version(system, backend, "current")
        settings = _sdk("sdk.config_builders").build_model_config(
            tp_size=tp, pp_size=1, attention_dp_size=1, moe_tp_size=tp // ep, moe_ep_size=ep
        )
        built = models.get_model(config, settings, backend)
        spec = compiler.build_engine_spec_json(
            built,
            model_path=config,
            system=system,
            backend=backend,
            backend_version=version,
            kv_block_size=None,
            systems_path=None,
            nextn=0,
            database=database.get_database(system, backend, version),
        )
        engine = compiler.EngineHandle(
            _sdk("_aiconfigurator_core").engine_spec_bincode_from_json(spec)
        )
    except Exception as error:
        raise no_tables(deployment, error) from error
    compiled = json.loads(spec)
    said = compiled["engine"]
    dtypes = {"weights": said["weight_dtype"], "KV cache": said["kv_cache_dtype"]}
    if models.check_is_moe(config):
        dtypes["experts"] = said["moe_dtype"]
    elif ep > 1:
        raise ValueError(f"{deployment.model} has no experts to spread over GPUs: leave out --ep")
    prefill, decode = (
        tuple(map(Operator, compiled[f"{phase}_ops"])) for phase in ("context", "generation")
    )
    return CompiledModel(engine, config, version, dtypes, prefill, decode)


def kv_room(
    deployment: Deployment,
    compiled: CompiledModel,
    max_num_tokens: int,
    max_num_seqs: int,
    memory_bytes: int | None = None,
) -> KVRoom:
    """Return AIConfigurator's estimate of the KV cache's size, on a GPU with this memory.

    Without `memory_bytes` it is the memory of the deployment's GPU.  Raises NoRoomError if the
    weights leave none.
    """
    system, backend = deployment.system, deployment.backend
    tp, ep = deployment.tensor_parallel, deployment.expert_parallel
    is_of_free = backend == "trtllm"
    try:
        estimate = _sdk("sdk.memory").estimate_kv_cache(
            compiled.config,
            system,
            backend,
            compiled.version,
            tp_size=tp,
            moe_tp_size=tp // ep,
            moe_ep_size=ep,
            max_num_tokens=max_num_tokens,
            max_batch_size=max_num_seqs,
            memory_fraction_kind="of_free" if is_of_free else "of_total",
            memory_fraction_value=_MEMORY_FRACTION,
            gpu_memory_capacity_bytes_override=memory_bytes,
        )
    except ValueError as error:
        raise NoRoomError(
            f"{deployment.model} does not fit on {system}, {deployment.parallelism}: {error}; "
            "spread it over more GPUs with --tp"
        ) from error
    share = _MEMORY_FRACTION
    if is_of_free:
        unused_bytes = estimate["total_kv_size_bytes"] * (1 / _MEMORY_FRACTION - 1)
        share = 1 - unused_bytes / estimate["total_gpu_capacity_bytes"]
    return KVRoom(
        int(estimate["total_kv_size_tokens"]), round(estimate["kv_size_per_token_bytes"]), share
    )


def config_folder(model: str) -> str:
    """Return a name or folder from which AIConfigurator can read the model's config.json.

    That is the folder itself, or the name of a model whose config.json AIConfigurator has, or the
    folder in the cache of the Hugging Face hub to which it was downloaded. Raises
    ConfigMissingError if it cannot be had.
    """
    if Path(model).is_dir():
        if not (Path(model) / "config.json").is_file():
            raise ConfigMissingError(
                f"the folder {model} has no config.json, the file that describes a model on the "
                "Hugging Face hub"
            )
        return model
    if model in _sdk("sdk.common").DefaultHFModels:
        return model
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(model, allow_patterns=_CONFIG_FILES)
    except Exception as error:
        raise ConfigMissingError(_no_config(model, str(error).partition("\n")[0])) from error
    if not (Path(folder) / "config.json").is_file():
        raise ConfigMissingError(_no_config(model, "it has no such file"))
    return folder


@cache
def measured_heads(system: str, backend: str) -> Mapping[tuple[str, int, int], frozenset[int]]:
    """Return the numbers of query heads with which decode attention was measured.

    The keys are the dtype of the KV cache, the number of KV heads (0 where it is that of the query
    heads) and the size of a head.
    """
    database = _sdk("sdk.perf_database")
    tables = database.get_database(
        system, backend, database.resolve_query_version(system, backend, "current")
    )
    view = _sdk("sdk.engine_table_view").fetch_table_view(tables, "_generation_attention_data")
    return {
        (str(dtype.name), kv_heads, size): frozenset(
            heads for by_heads in windows.values() for heads in by_heads
        )
        for dtype, by_kv_heads in view.items()
        for kv_heads, sizes in by_kv_heads.items()
        for size, windows in sizes.items()
    }


def peaks_of(system: str) -> Peaks:
    """Return the peaks of a GPU with tables, as AIConfigurator takes them from data sheets."""
    gpu = _sdk("sdk.perf_database").load_system_spec(system)["gpu"]
    return Peaks(float(gpu["bfloat16_tc_flops"]), float(gpu["mem_bw"]))


def _no_config(model: str, reason: str) -> str:
    return (
        f"cannot download the config.json of {model!r} from the Hugging Face hub: {reason}; "
        "save that file in a folder, and give the folder as --model"
    )


def no_tables(deployment: Deployment, error: Exception) -> MissingTablesError:
    """Return the error for tables that AIConfigurator lacks, for the reason that it gave."""
    return MissingTablesError(
        f"AIConfigurator {VERSION} has no tables of {deployment.model!r} on {deployment.system!r} "
        f"with {deployment.backend!r}, {deployment.parallelism}: {error}"
    )


def _sdk(name: str) -> Any:
    """Return a module of AIConfigurator.

    Raises MissingTablesError if the package is absent or has another version than `VERSION`.
    """
    try:
        module = import_module(f"aiconfigurator_core.{name}")
        installed = metadata.version("aiconfigurator-core")
    except ImportError as error:
        raise MissingTablesError(
            f"AIConfigurator's tables need an extra ({error}): {_REMEDY}"
        ) from error
    if installed != VERSION:
        raise MissingTablesError(
            f"aiconfigurator-core {installed} is installed and may not say what {VERSION} says, "
            f"which slosched was checked with: {_REMEDY}"
        )
    # At each start it warns about every table that it reads from a neighbouring version.
    logging.getLogger("aiconfigurator_core").setLevel(logging.ERROR)
    return module
