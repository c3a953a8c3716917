"""Steps that vLLM executed, written down as a profile for `slosched fit`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ParamSpec

import torch
import vllm
from vllm.platforms import current_platform

from slosched.integrations.vllm.settings import Settings, SettingsError
from slosched.integrations.vllm.steps import Record
from slosched.perfmodel import Measurement, Profile, read_profile, write_profile
from slosched.perfmodel.device import cpu_name
from slosched.perfmodel.graphs import GRAPH_SIZES, StepGraphs
from slosched.perfmodel.measurement import append_measurement

logger = logging.getLogger("vllm.slosched")
_P = ParamSpec("_P")

_SAME = (
    "model",
    "device",
    "engine",
    "dtype",
    "tensor_parallel_size",
    "pipeline_parallel_size",
)
"""The facts in which a profile and its continuation must agree."""

_UNSAID = {"tensor_parallel_size": "1", "pipeline_parallel_size": "1"}
"""The values that hold for a profile that does not name them."""


def device_name() -> str:
    """Return the system's name of the device on which vLLM runs."""
    return cpu_name() if current_platform.is_cpu() else str(current_platform.get_device_name())


def provenance(config: Any, device: str, num_blocks: int) -> dict[str, str]:
    """Return the facts that describe measurements in a vLLM with this `VllmConfig`."""
    block_size = config.cache_config.block_size
    is_cpu = config.device_config.device_type == "cpu"
    return {
        "model": str(config.model_config.model),
        "device": device,
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "threads": str(torch.get_num_threads()) if is_cpu else "",
        "engine": f"vllm {vllm.__version__}",
        "tensor_parallel_size": str(config.parallel_config.tensor_parallel_size),
        "pipeline_parallel_size": str(config.parallel_config.pipeline_parallel_size),
        "block_size": str(block_size),
        "kv_capacity_tokens": str(num_blocks * block_size),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        **_kernel_facts(config),
    }


def _kernel_facts(config: Any) -> dict[str, str]:
    """Return what some forms of latency model have to know: heads, experts, and CUDA graphs."""
    model, parallel = config.model_config, config.parallel_config
    facts = {
        "num_query_heads": model.get_num_attention_heads(parallel),
        "num_kv_heads": model.get_num_kv_heads(parallel),
    }
    if torch.cuda.is_available():
        facts["num_sms"] = torch.cuda.get_device_properties(0).multi_processor_count
    # Older versions of vLLM do not say how many experts compute a token.
    per_token = getattr(model, "get_num_experts_per_tok", lambda: 0)()
    if model.get_num_experts() and per_token:
        facts |= {"num_experts": model.get_num_experts(), "num_experts_per_token": per_token}
    graphs = config.compilation_config
    if graphs.cudagraph_mode and (sizes := tuple(sorted(graphs.cudagraph_capture_sizes or ()))):
        decodes_alone = not graphs.cudagraph_mode.mixed_mode().value
        facts[GRAPH_SIZES] = StepGraphs(sizes, decodes_alone)
    return {name: str(value) for name, value in facts.items() if value}


def recorder(settings: Settings, facts: dict[str, str], engine: int = 0) -> Record | None:
    """Return a function that writes each step to `settings.record`; None if it names no file.

    Engines of a data-parallel server are processes of their own and write files of their own: for
    steps.csv, engine 1 writes steps-1.csv.  Raises SettingsError if that file is not a profile of
    the same device, model and engine.
    """
    if settings.record is None:
        return None
    path = Path(settings.record)
    if engine > 0:
        path = path.with_stem(f"{path.stem}-{engine}")
    if settings.emulate is not None:
        facts = facts | {"device": f"emulated {settings.emulate}, {settings.emulate_slowdown:g}x"}
    if path.exists():
        found = read_profile(path, may_be_empty=True).provenance
        for name in _SAME:
            before = found.get(name, _UNSAID.get(name))
            if before != facts[name]:
                raise SettingsError(
                    f"slosched.record: {path} is a profile with another {name} "
                    f"({before!r}, now {facts[name]!r}); name another file"
                )
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_profile(Profile((), {**facts, "method": "recorded while vLLM served"}), path)

    def record(step: Measurement) -> None:
        append_measurement(step, path)

    return until_it_fails(record, path)


def until_it_fails(write: Callable[_P, None], path: Path) -> Callable[_P, None]:
    """Return `write` into `path` that is called no more once the disk is full or gone.

    The engine must not end for what is only written down beside it.
    """
    has_failed = False

    def guarded(*args: _P.args, **kwargs: _P.kwargs) -> None:
        nonlocal has_failed
        if has_failed:
            return
        try:
            write(*args, **kwargs)
        except OSError as error:
            has_failed = True
            logger.error("slosched: no more is written into %s, since that failed: %s", path, error)

    return guarded
