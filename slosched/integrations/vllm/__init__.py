"""slosched inside vLLM: a policy decides, vLLM keeps KV cache, prefixes, LoRA, speculation.

    vllm serve MODEL --scheduler-cls slosched.integrations.vllm.SLOScheduler \
        --additional-config '{"slosched": {"policy": "goodput", "profile": "rtx4090/llama-3.1-8b",
                                           "slo_ttft_s": 1, "slo_tpot_s": 0.05}}'

Importing this package does not import vLLM; using one of its classes does.  See docs/vllm.md.
"""

from __future__ import annotations

import importlib

_HOMES = {
    "SLOScheduler": "slosched.integrations.vllm.scheduler",
    "AsyncSLOScheduler": "slosched.integrations.vllm.scheduler",
    "SLOMiddleware": "slosched.integrations.vllm.middleware",
    "EmulatedExecutor": "slosched.integrations.vllm.executor",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
