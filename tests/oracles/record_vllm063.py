"""Record decisions of vLLM 0.6.3's own V0 scheduler: writes the files `vllm063_*.jsonl.gz`.

    pip download vllm==0.6.3 --no-deps && pip install msgspec torch pydantic
    python -m zipfile -e vllm-0.6.3-*.whl unpacked
    python record_vllm063.py unpacked more vllm063_more.jsonl.gz
    python record_vllm063.py unpacked prefix vllm063_prefix.jsonl.gz

Only the scheduler, its block manager and its sequences are vLLM's.  What they import for other
purposes (configuration, logging, kernels) is replaced by stand-ins, and they are given the time.
"""

from __future__ import annotations

import enum
import gzip
import json
import logging
import random
import sys
import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

TICK_S = 0.125
"""All times are multiples of this, so that sums are exact."""


class Device(enum.Enum):
    GPU = enum.auto()
    CPU = enum.auto()


class PyObjectCache:
    """A stand-in that returns new objects, where vLLM's class reuses those of earlier steps."""

    def __init__(self, builder: Any) -> None:
        self.get_object = builder

    def reset(self) -> None:
        pass


def chunk_list(values: list[int], size: int) -> Iterator[list[int]]:
    for begin in range(0, len(values), size):
        yield values[begin : begin + size]


def stand_in(name: str, **members: Any) -> None:
    module = types.ModuleType(name)
    vars(module).update(members)
    sys.modules[name] = module


def prepare(unpacked: Path) -> Any:
    """Return vLLM's scheduler module, loaded with stand-ins for what it imports."""
    package = types.ModuleType("vllm")
    package.__path__ = [str(unpacked / "vllm")]
    sys.modules["vllm"] = package
    anything = type("Anything", (), {})
    stand_in("vllm.config", CacheConfig=anything, LoRAConfig=anything, SchedulerConfig=anything)
    stand_in("vllm.logger", init_logger=lambda _: logging.getLogger("vllm"))
    stand_in("vllm.inputs", EncoderDecoderLLMInputs=dict, LLMInputs=dict)
    stand_in("vllm.inputs.parse", is_valid_encoder_decoder_llm_inputs=lambda _: False)
    stand_in("vllm.spec_decode")
    stand_in("vllm.spec_decode.metrics", SpecDecodeWorkerMetrics=anything)
    stand_in(
        "vllm.utils",
        Device=Device,
        PyObjectCache=PyObjectCache,
        cdiv=lambda a, b: -(a // -b),
        chunk_list=chunk_list,
        STR_NOT_IMPL_ENC_DEC_PREFIX_CACHE="",
        STR_NOT_IMPL_ENC_DEC_SWA="",
    )
    logging.disable(logging.ERROR)
    from vllm.core import scheduler  # type: ignore[import-not-found]

    return scheduler


def draw_with_prefixes(seed: int) -> dict[str, Any]:
    """Return a workload with shared prefixes, often with a cache that is too small for all."""
    rng = random.Random(seed)
    size = rng.choice([2, 4, 8])
    blocks = rng.randint(8, 40) if rng.random() < 0.7 else rng.randint(100, 200)
    chunked = rng.random() < 0.5
    longest = max(16, min(64, blocks * size // 2))
    policy = "priority" if not chunked and rng.random() < 0.3 else "fcfs"
    swaps = policy == "fcfs" and rng.random() < 0.4
    num_families = rng.choice([1, 3])
    arrivals = []
    for k in range(rng.randint(4, 12)):
        length = rng.randint(1, longest * 3 // 4)
        arrivals.append(
            {
                "step": rng.choice([0, rng.randint(0, 30)]),
                "id": f"r{k}",
                "len": length,
                "family": rng.randint(1, num_families),
                "shared_len": min(length, rng.choice([0, 8, 16, 32, 99])),
                "max_tokens": rng.randint(1, min(30, longest - length)),
                "priority": rng.choice([0, 0, 1, 5]) if policy == "priority" else 0,
                "lora": 0,
            }
        )
    return {
        "engine": "vllm",
        "version": "0.6.3",
        "seed": seed,
        "config": {
            "blocks": blocks,
            "bs": size,
            "cpu_blocks": rng.choice([blocks, 4 * blocks]) if swaps else 0,
            "mbt": rng.choice([16, 32, 64]) if chunked else longest,
            "max_seqs": rng.choice([2, 4, 8]),
            "max_len": longest,
            "chunked": chunked,
            "policy": policy,
            "delay": 0.0,
            "preemption": "swap" if swaps else None,
            "prefix": True,
            "lookahead": 0,
            "max_loras": None,
        },
        "arrivals": sorted(arrivals, key=lambda arrival: arrival["step"]),
    }


def draw_workload(seed: int) -> dict[str, Any]:
    """Return a workload with watermarks, delays, lookahead slots or LoRA adapters."""
    rng = random.Random(seed)
    blocks, size = rng.randint(100, 320), rng.choice([1, 2, 4])
    chunked = rng.random() < 0.4
    longest = blocks * size // 2
    policy = "priority" if not chunked and rng.random() < 0.4 else "fcfs"
    swaps = policy == "fcfs" and rng.random() < 0.4
    loras = 0 if chunked or rng.random() < 0.5 else rng.randint(1, 2)
    arrivals = []
    for k in range(rng.randint(4, 14)):
        length = rng.randint(1, longest * 3 // 4)
        arrivals.append(
            {
                "step": rng.choice([0, rng.randint(0, 40)]),
                "id": f"r{k}",
                "len": length,
                "max_tokens": rng.randint(1, min(80, longest - length)),
                "priority": rng.choice([0, 0, 1, 5]) if policy == "priority" else 0,
                "lora": rng.randint(0, 3) if loras else 0,
            }
        )
    return {
        "engine": "vllm",
        "version": "0.6.3",
        "seed": seed,
        "config": {
            "blocks": blocks,
            "bs": size,
            "cpu_blocks": rng.choice([blocks // 2, 4 * blocks]) if swaps else 0,
            "mbt": rng.choice([16, 64]) if chunked else longest,
            "max_seqs": rng.choice([2, 4, 8]),
            "max_len": longest,
            "chunked": chunked,
            "policy": policy,
            "delay": rng.choice([0.0, 0.5, 2.0]),
            "preemption": "swap" if swaps else None,
            "prefix": False,
            "lookahead": rng.choice([0, 0, 1, 3, 5]),
            "max_loras": loras or None,
        },
        "arrivals": sorted(arrivals, key=lambda arrival: arrival["step"]),
    }


def make_scheduler(module: Any, config: dict[str, Any]) -> Any:
    settings = types.SimpleNamespace(
        max_num_batched_tokens=config["mbt"],
        max_num_seqs=config["max_seqs"],
        max_model_len=config["max_len"],
        chunked_prefill_enabled=config["chunked"],
        policy=config["policy"],
        delay_factor=config["delay"],
        preemption_mode=config["preemption"],
        num_lookahead_slots=config["lookahead"],
        num_scheduler_steps=1,
        is_multi_step=False,
        use_v2_block_manager=True,
        embedding_mode=False,
        send_delta_data=False,
    )
    cache = types.SimpleNamespace(
        num_gpu_blocks=config["blocks"],
        num_cpu_blocks=config["cpu_blocks"],
        block_size=config["bs"],
        sliding_window=None,
        enable_prefix_caching=config["prefix"],
        is_attention_free=False,
    )
    loras = config["max_loras"] and types.SimpleNamespace(max_loras=config["max_loras"])
    return module.Scheduler(settings, cache, loras)


def make_group(arrival: dict[str, Any], number: int, block_size: int, now_s: float) -> Any:
    from vllm.lora.request import LoRARequest  # type: ignore[import-not-found]
    from vllm.sampling_params import SamplingParams  # type: ignore[import-not-found]
    from vllm.sequence import Sequence, SequenceGroup  # type: ignore[import-not-found]

    adapter = arrival["lora"]
    lora = LoRARequest(f"lora{adapter}", adapter, "somewhere") if adapter else None
    own, shared = 1000 * (number + 1), 100_000 * arrival.get("family", 0)
    num_shared = arrival.get("shared_len", 0)
    tokens = [i + (shared if i < num_shared else own) for i in range(arrival["len"])]
    inputs = {"prompt_token_ids": tokens, "prompt": None, "multi_modal_data": None}
    sequence = Sequence(number, inputs, block_size, lora_request=lora)
    return SequenceGroup(
        arrival["id"],
        [sequence],
        arrival_time=now_s,
        sampling_params=SamplingParams(max_tokens=arrival["max_tokens"]),
        lora_request=lora,
        priority=arrival["priority"],
    )


def record(module: Any, workload: dict[str, Any]) -> None:
    """Play the workload and add its `steps`, and the time of every arrival and step.

    If vLLM schedules nothing in ten steps and no request is still to arrive, the recording ends
    before these steps and is marked `hangs`.
    """
    rng = random.Random(-workload["seed"] - 1)
    scheduler = make_scheduler(module, workload["config"])
    pending = list(workload["arrivals"])
    steps = workload["steps"] = []
    now_s, number = 1000.0, 0
    while pending or scheduler.has_unfinished_seqs():
        while pending and pending[0]["step"] <= len(steps):
            now_s += TICK_S
            arrival = pending.pop(0)
            arrival["arrival_s"] = now_s
            group = make_group(arrival, number, workload["config"]["bs"], now_s)
            scheduler.add_seq_group(group)
            number += 1
        now_s += TICK_S * rng.choice([1, 2, 8])
        module.time = types.SimpleNamespace(time=lambda: now_s, perf_counter=lambda: now_s)  # noqa: B023
        try:
            steps.append({"now_s": now_s, **step(scheduler)})
        except (RuntimeError, ValueError) as error:
            steps.append({"now_s": now_s, "error": type(error).__name__, "msg": str(error)})
            return
        if not pending and len(steps) >= 10 and not any(step["batch"] for step in steps[-10:]):
            workload["hangs"] = True
            del steps[-10:]
            return


def step(scheduler: Any) -> dict[str, Any]:
    from vllm.sequence import Logprob, SequenceStatus

    metadata, outputs, _ = scheduler.schedule()
    batch, finished = [], []
    for meta, scheduled in zip(metadata, outputs.scheduled_seq_groups, strict=True):
        group, tokens = scheduled.seq_group, scheduled.token_chunk_size
        stage = "prefill" if meta.is_prompt else "decode"
        found = len(meta.computed_block_nums or ())
        batch.append(
            [
                *(group.request_id, stage, tokens),
                *([] if meta.do_sample else ["nosample"]),
                *([f"computed_blocks={found}"] if found else []),
            ]
        )
        group.update_num_computed_tokens(tokens)
        if not meta.do_sample:
            continue
        sequence = group.seqs[0]
        sequence.append_token_id(7, {7: Logprob(0.0)})
        if sequence.get_output_len() >= group.sampling_params.max_tokens:
            sequence.status = SequenceStatus.FINISHED_LENGTH_CAPPED
            finished.append(group.request_id)
    scheduler.free_finished_seq_groups()
    return {
        "batch": batch,
        "swap_in": len(outputs.blocks_to_swap_in),
        "swap_out": len(outputs.blocks_to_swap_out),
        "preempted": outputs.preempted,
        "ignored": [group.request_id for group in outputs.ignored_seq_groups],
        "finished": finished,
        "waiting": names(scheduler.waiting),
        "running": names(scheduler.running),
        "swapped": names(scheduler.swapped),
        "free": scheduler.block_manager.get_num_free_gpu_blocks(),
    }


def names(groups: Iterable[Any]) -> list[str]:
    return [group.request_id for group in groups]


KINDS = {"more": (draw_workload, 120), "prefix": (draw_with_prefixes, 150)}


def main(unpacked: Path, kind: str, target: Path) -> None:
    draw, num_workloads = KINDS[kind]
    module = prepare(unpacked)
    with target.open("wb") as raw, gzip.GzipFile(fileobj=raw, mode="wb", mtime=0) as file:
        for seed in range(num_workloads):
            workload = draw(seed)
            record(module, workload)
            line = json.dumps(workload, separators=(",", ":"))
            file.write(line.encode() + b"\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
