"""Which LoRA adapters are in use, for GET /metrics.

Gateways read it to send a request to a server that has its adapter in use already.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from slosched.core import Request, RequestStatus
from slosched.engine.server.adapters import Adapters
from slosched.engine.server.prometheus import labels_of, sample


def adapter_lines(
    requests: Iterable[Request], adapters: Adapters, max_loras: int | None
) -> Iterator[str]:
    """Yield vLLM's metric of the adapters of running and of waiting `requests`.

    Its value is the time in seconds since 1970, as in vLLM.  Without a limit of adapters in one
    step, all that are loaded may be.
    """
    names = {adapter.lora_id: adapter.name for adapter in adapters.loaded}
    running: set[str] = set()
    waiting: set[str] = set()
    for request in requests:
        if request.lora_id is not None:
            users = running if request.status is RequestStatus.RUNNING else waiting
            users.add(names.get(request.lora_id, request.lora_id))
    labels = labels_of(
        max_lora=str(len(names) if max_loras is None else max_loras),
        running_lora_adapters=",".join(sorted(running)),
        waiting_lora_adapters=",".join(sorted(waiting)),
    )
    text = "LoRA adapters of running and of waiting requests, with the time."
    yield from sample("vllm:lora_requests_info", "gauge", text, labels, time.time())
