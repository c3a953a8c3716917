"""vLLM's limits on a step, as slosched's."""

from __future__ import annotations

from typing import Any

from slosched.core import DeadlineRule, Limits


def limits_of(host: Any, deadline_rule: DeadlineRule, num_blocks_per_row: int = 1) -> Limits:
    """Return the limits of `host`, vLLM's scheduler.

    A block of the limits stands for `num_blocks_per_row` of vLLM's.
    """
    return Limits(
        max_num_batched_tokens=host.max_num_scheduled_tokens,
        max_num_seqs=host.max_num_active_reqs,
        max_loras=None if host.lora_config is None else host.lora_config.max_loras,
        max_chunk_tokens=host.scheduler_config.long_prefill_token_threshold or None,
        num_watermark_blocks=-(-host.kv_cache_manager.watermark_blocks // num_blocks_per_row),
        deadline_rule=deadline_rule,
    )


def longest_chunk(host: Any) -> int | None:
    """Return the most tokens of one request in the next step of `host`; None for no limit.

    vLLM counts every request that it has not ended, whether or not it can run now.
    """
    config = host.scheduler_config
    threshold = int(config.long_prefill_token_threshold)
    num_requests = len(host.running) + len(host.waiting) + len(host.kv_holding_waiting)
    if not threshold or num_requests <= 1:
        return None
    if config.long_prefill_token_threshold_adaptive:
        threshold = max(threshold, config.max_num_batched_tokens // num_requests)
    return threshold
