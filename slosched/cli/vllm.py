"""`--engine vllm`: vLLM instead of slosched's own engine, for `profile` and `serve`."""

from __future__ import annotations

import json
import math
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from slosched.cli.console import console
from slosched.cli.local_model import ExtraMissingError
from slosched.cli.options import KVOptions, ModelOptions, PromiseOptions, is_given
from slosched.cli.service_options import ServiceOptions
from slosched.core import NO_SLO, DeadlineRule, Limits
from slosched.engine.profiling import ProfileLimits
from slosched.integrations.vllm.hooks import installed_version
from slosched.integrations.vllm.settings import SECTION, SettingsError, read_settings
from slosched.policy.spec import make_policy
from slosched.workload.service_tier import ServiceTier

if TYPE_CHECKING:
    from slosched.integrations.vllm.stepping import VLLMSteps

_PLUGIN = "slosched.integrations.vllm"
_EMBEDDED = "smollm2-135m"
_OURS_ALONE = (
    "admin_api_key",
    "attention",
    "calibrate",
    "device",
    "drain_timeout",
    "graph_sizes",
    "hang_timeout",
    "host_kv_tokens",
    "log_format",
    "log_interval",
    "log_requests",
    "lora",
    "max_loras",
    "allow_lora_updates",
    "allowed_origins",
    "max_concurrent_requests",
    "otlp_traces_endpoint",
    "overlap",
    "preemption",
    "prefix_cache",
    "prefix_cache_eviction",
    "prefix_host_tokens",
    "prefix_host_writes",
    "recalibrate",
    "request_timeout",
    "root_path",
    "speculate",
    "ssl_certfile",
    "ssl_keyfile",
    "step_timeout",
    "threads",
    "torch_profiler_dir",
    "uvicorn_log_level",
)
"""Options for slosched's own engine, which vLLM does not have."""


class Engine(StrEnum):
    """The engine that runs the model."""

    TORCH = "torch"
    VLLM = "vllm"


EngineName = Annotated[
    Engine,
    typer.Option(
        help="torch is slosched's own engine; vllm needs vLLM in the same Python environment."
    ),
]
Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[MODEL] [-- VLLM OPTIONS]",
        help="The model, instead of --model; with --engine vllm, any of vLLM's own options.",
    ),
]


def split(words: Sequence[str] | None, engine: Engine, model: str) -> tuple[str, tuple[str, ...]]:
    """Return the model and vLLM's own options, from the arguments after a command's options."""
    rest = list(words or ())
    if rest and not rest[0].startswith("-"):
        model = rest.pop(0)
    if rest and engine is not Engine.VLLM:
        raise ValueError(
            f"{' '.join(rest)} is for --engine vllm; slosched's own engine does not know it"
        )
    return model, tuple(rest)


def check_vllm(context: typer.Context, *, force: bool, unused: Sequence[str] = ()) -> None:
    """Raise unless a tested version of vLLM is installed; with `force`, any version will do.

    Raise ValueError for an option that vLLM does not have, and for those that are `unused`.
    """
    found = installed_version()
    if found is None:
        raise ExtraMissingError(
            f"--engine vllm needs vLLM, which is not installed in {sys.prefix}: pip install vllm "
            "(docs/vllm.md), or leave --engine out"
        )
    if not force:
        found.check()
    if given := [name for name in (*_OURS_ALONE, *unused) if is_given(context, name)]:
        flag = "--" + given[0].replace("_", "-")
        raise ValueError(f"{flag} is for slosched's own engine; put vLLM's own options after --")
    if is_given(context, "tenant"):
        raise ValueError(
            "--tenant is for slosched's own engine; in vLLM the setting `tenants` of the long form "
            "names tenants by the digests of their keys (docs/vllm.md)"
        )


def settings_of(
    policy: str,
    service: ServiceOptions,
    promise: PromiseOptions,
    rule: DeadlineRule,
    latency_model: str | None,
    emulate: str | None,
    *,
    force: bool,
) -> dict[str, Any]:
    """Return the `slosched` part of vLLM's --additional-config.

    Raise SettingsError now for what vLLM would refuse only after a minute, deep in its log.
    """
    slo = promise.slo() or NO_SLO
    policy = service.spec_with_floors(policy)
    chosen = {
        "policy": policy,
        "slo_tiers": {name: _tier(tier) for name, tier in service.tiers().items()} or None,
        "on_infeasible": str(service.on_infeasible),
        "deadline_rule": str(rule),
        "profile": None if latency_model is None else _path_of(latency_model),
        "emulate": None if emulate is None else _path_of(emulate),
        "slo_ttft_s": slo.ttft_s if slo.ttft_s < math.inf else None,
        "slo_tpot_s": slo.tpot_s if slo.tpot_s < math.inf else None,
        "any_device": force or None,
    }
    settings = {name: value for name, value in chosen.items() if value is not None}
    read = read_settings({SECTION: settings})
    # Only vLLM knows the name of the device.
    model = replace(read, any_device=True).make_model("any")
    make_policy(policy)
    try:
        read.make_policy(model, Limits(deadline_rule=rule))
    except SettingsError as error:
        if model is not None:
            raise
        raise SettingsError(
            f"the policy {policy!r} needs a latency model: give a bundled one (`slosched profile "
            "--list`) as --latency-model, or have this device measured by `slosched profile "
            "--engine vllm MODEL -o vllm.csv` and `slosched fit vllm.csv -o vllm.json`"
        ) from error
    return settings


def _tier(tier: ServiceTier) -> dict[str, Any]:
    """Return a tier of the settings, without the times that it does not promise."""
    parts = {
        "slo_ttft_s": tier.slo.ttft_s if tier.slo.ttft_s < math.inf else None,
        "slo_tpot_s": tier.slo.tpot_s if tier.slo.tpot_s < math.inf else None,
        "slo_e2e_s": tier.slo.e2e_s,
        "on_infeasible": None if tier.on_infeasible is None else str(tier.on_infeasible),
    }
    return {name: value for name, value in parts.items() if value is not None}


def become_server(command: list[str], api_keys: Sequence[str]) -> NoReturn:
    """Print and run a server's command in place of this process.

    vLLM is told the key that it asks for by a variable: in its command, every user of the machine
    could read it.  Raise ValueError for several keys, for which vLLM has no variable.
    """
    if len(api_keys) > 1:
        raise ValueError(
            f"vLLM takes one key from --api-key or SLOSCHED_API_KEY, not {len(api_keys)}; put its "
            "own option after --: -- --api-key KEY KEY"
        )
    if api_keys:
        os.environ["VLLM_API_KEY"] = api_keys[0]
    console.print(f"running {shlex.join(command)}", markup=False)
    os.execv(command[0], command)


def serve_command(
    context: typer.Context,
    model: str,
    address: tuple[str, int],
    settings: Mapping[str, Any],
    rest: Sequence[str],
) -> list[str]:
    """Return the command that starts vLLM's server with slosched's scheduler."""
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", model_path(model), "--served-model-name", model]
    command += ["--host", address[0], "--port", str(address[1])]
    command += ["--scheduler-cls", f"{_PLUGIN}.SLOScheduler"]
    command += ["--middleware", f"{_PLUGIN}.SLOMiddleware"]
    command += ["--additional-config", json.dumps({SECTION: settings})]
    if "emulate" in settings:
        command += ["--distributed-executor-backend", f"{_PLUGIN}.EmulatedExecutor"]
    for name in ("max_num_batched_tokens", "max_num_seqs", "dtype", "load_format", "block_size"):
        if is_given(context, name):
            command += ["--" + name.replace("_", "-"), str(context.params[name])]
    return [*command, *rest]


@dataclass(frozen=True)
class VLLMModel:
    """A model that is loaded in vLLM and can run steps."""

    name: str
    executor: VLLMSteps
    block_bytes: int = 0
    """The size of a block that is copied to the host; 0, as vLLM copies none."""

    def provenance(self) -> dict[str, str]:
        return self.executor.provenance() | {"model": self.name}

    def profile_limits(self, limits: Limits, max_context_tokens: int | None) -> ProfileLimits:
        steps = self.executor
        # Leave room for the token that the last step of a request emits.
        longest = min(steps.max_model_len - 1, steps.num_blocks * steps.block_size)
        return ProfileLimits(
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_num_seqs=limits.max_num_seqs,
            max_context_tokens=min(longest, max_context_tokens or longest),
            num_blocks=steps.num_blocks,
            block_size=steps.block_size,
        )


def open_vllm(
    context: typer.Context,
    model: ModelOptions,
    name: str,
    limits: Limits,
    kv: KVOptions,
    rest: Sequence[str],
) -> VLLMModel:
    """Load the model `name` into a vLLM engine in this process."""
    # A hundred lines of log would break up the progress bar; warnings are still shown.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    with console.status("importing vLLM"):
        from slosched.integrations.vllm.stepping import EngineOptions, VLLMSteps

    options = EngineOptions(
        model_path(name),
        limits.max_num_batched_tokens,
        limits.max_num_seqs,
        kv_tokens=kv.kv_tokens,
        block_size=kv.block_size if is_given(context, "block_size") else None,
        dtype=model.dtype,
        load_format=str(model.load_format),
        others=tuple(rest),
    )
    with console.status(f"starting vLLM with {name}: it may compile the model first, for minutes"):
        return VLLMModel(name, VLLMSteps(options))


def model_path(name: str) -> str:
    """Return the name or path by which vLLM finds the model.

    The embedded model is unpacked into a directory of the cache.
    """
    if name != _EMBEDDED:
        return name
    from slosched.engine.torch.embedded import embedded_model_dir  # importing torch takes a second

    try:
        return str(embedded_model_dir())
    except ModuleNotFoundError as error:  # installed for vLLM only, without the torch extra
        raise ExtraMissingError(
            f"unpacking {_EMBEDDED} needs {error.name}, this once: pip install {error.name}; or "
            "name a model that vLLM knows"
        ) from error


def _path_of(latency_model: str) -> str:
    """Return the absolute path if it is a file, as vLLM's processes may start elsewhere."""
    path = Path(latency_model)
    return str(path.absolute()) if path.is_file() else latency_model
