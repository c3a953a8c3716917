"""Record decisions of SGLang 0.5.5's own scheduler: the recordings `more`, `paged`, `pages`, `newer`.

    pip download sglang==0.5.5 --no-deps && pip install torch numpy transformers
    python -m zipfile -e sglang-0.5.5-*.whl unpacked
    python record_sglang055.py unpacked more sglang055_more.jsonl.gz [sglang055.jsonl.gz]
    python record_sglang055.py unpacked paged sglang055_paged.jsonl.gz
    python record_sglang055.py unpacked pages sglang055_pages.jsonl.gz
    python record_sglang055.py unpacked newer sglang055_newer.jsonl.gz

The last command also needs the package of 0.5.23, unpacked into a folder `newer` next to `unpacked`.

Scheduler, batches, radix cache and memory pools are SGLang's.  What they import for other purposes
(models, kernels, sockets) is replaced by stand-ins, and the forward pass emits the token 7.  If a
recording is given as a fourth argument, its first workloads are played again, and the steps must be
as recorded.

A request that SGLang preempts for a more urgent one is "driven out" here.  In SGLang these requests
queue up in the order of a Python `set`, which is arbitrary; here they do so in the order of the
running batch.  A recording ends before SGLang does one of the following:

- it drives out a request that has ended, which frees its memory twice;
- it drives out requests for one that then does not fit, and loses them;
- it continues a chunked prompt with no tokens, or with a negative number of them;
- it stops with an error because memory runs out.

`paged` has pages of several tokens without the radix cache, `pages` has them with it.  The two
kernels that write the slots of a batch are rewritten here, since they do not run on a CPU.  `newer`
has two orders of SGLang 0.5.23, with pages of one token and of more (`sglang0523_orders.py`).
"""

from __future__ import annotations

import gzip
import json
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from sglang0523_orders import ORDERS, load_orders, make_adder_class, make_policy, note_queued
from sglang055_alone import InRunningOrder, Mode, prepare

MAX_STEPS = 200
NUM_AGAIN = 12


class StopRecordingError(Exception):
    """The error that ends a recording: SGLang is about to do something that cannot be replayed."""


def make_scheduler_class(sglang: SimpleNamespace) -> type:
    """Return a subclass of SGLang's Scheduler that needs no processes and records its decisions."""

    class Recorded(sglang.scheduler.Scheduler):  # type: ignore[name-defined, misc]
        def __init__(self, config: dict[str, Any]) -> None:
            max_loras, chunk = config.get("max_loras"), config["chunk"]
            low_first = config.get("low_first", False)
            args = SimpleNamespace(
                attention_backend="torch_native",
                decode_log_interval=10**9,
                disaggregation_decode_enable_offload_kvcache=False,
                disaggregation_mode="null",
                pp_max_micro_batch_size=config["max_running"],
                schedule_low_priority_values_first=low_first,
                speculative_algorithm=None,
            )
            for module in (sglang.scheduler, sglang.common):
                module.get_global_server_args = lambda: args
            pool = sglang.pools.ReqToTokenPool(64, 512, "cpu", enable_memory_saver=False)
            page_size = config.get("page", 1)
            allocator, tree = make_memory(
                sglang, pool, config["kv"], page_size, config.get("radix", page_size == 1)
            )
            first = min(0.7 * config["conserv"], 1.0)
            least = min(first * 0.14, 1.0)
            self.__dict__.update(
                server_args=args,
                tp_worker=SimpleNamespace(
                    model_runner=SimpleNamespace(mambaish_config=None),
                    can_run_lora_batch=lambda ids: max_loras is None or len(ids) <= max_loras,
                ),
                model_config=SimpleNamespace(
                    is_matryoshka=False, is_encoder_decoder=False, vocab_size=1 << 30
                ),
                spec_algorithm=SimpleNamespace(is_none=lambda: True, is_eagle=lambda: False),
                req_to_token_pool=pool,
                token_to_kv_pool_allocator=allocator,
                tree_cache=tree,
                running_batch=sglang.batch.ScheduleBatch(reqs=[], batch_is_full=False),
                **dict.fromkeys(("chunked_req", "last_batch", "truncation_align_size")),
                waiting_queue=[],
                grammar_queue=[],
                try_preemption=config["priority"],
                enable_priority_scheduling=config["priority"],
                priority_scheduling_preemption_threshold=config["threshold"],
                schedule_low_priority_values_first=low_first,
                **dict.fromkeys(
                    (
                        *("abort_on_priority_when_disabled", "enable_hierarchical_cache"),
                        *("enable_hicache_storage", "enable_metrics", "enable_overlap"),
                    ),
                    False,
                ),
                **dict.fromkeys(("forward_ct", "forward_ct_decode", "num_generated_tokens"), 0),
                page_size=page_size,
                **dict.fromkeys(("pp_size", "decode_mem_cache_buf_multiplier"), 1),
                max_prefill_tokens=config["max_prefill"],
                chunked_prefill_size=chunk if chunk > 0 else None,
                is_mixed_chunk=config["mixed"] and chunk > 0,
                enable_lora=max_loras is not None,
                disaggregation_mode=Mode.NULL,
                is_generation=True,
                device="cpu",
                new_token_ratio=first,
                first_ratio=first,
                min_new_token_ratio=least,
                new_token_ratio_decay=(first - least) / 600,
                retracted=[],
                driven_out=[],
                num_processed=0,
            )
            name = config["policy"]
            if name in ORDERS:
                self.policy = make_policy(sglang, sglang.newer, self, name)
                self.adder = make_adder_class(sglang.adder, self.policy, name)
            else:
                self.policy = sglang.policy.SchedulePolicy(
                    name, tree, False, config["priority"], low_first
                )
                self.adder = sglang.adder

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(name)  # the stand-ins among its bases would answer every name

        def current_scheduler_metrics_enabled(self) -> bool:
            return False

        def _prefetch_kvcache(self, _: Any) -> None:
            pass

        def _abort_on_queued_limit(self, _: Any) -> bool:
            return False

        def stream_output(self, *_: Any) -> None:
            pass

        def log_decode_stats(self, *_: Any, **__: Any) -> None:
            pass

        def _add_request_to_queue(self, request: Any, is_retracted: bool = False) -> None:
            if is_retracted:
                self.retracted.append(request.rid)
            elif request.output_ids:
                self.driven_out.append(request.rid)
            if self.adder is not sglang.adder:
                note_queued(request, self.num_processed)
            super()._add_request_to_queue(request, is_retracted)

        def step(self) -> dict[str, Any]:
            """Run one round of `event_loop_normal`, and return what it decided."""
            self.retracted: list[str] = []
            self.driven_out: list[str] = []
            sglang.scheduler.PrefillAdder = self.adder
            batch = self.next_batch()
            self.num_processed += (batch.extend_num_tokens or 0) if batch else 0
            decision: dict[str, Any] = {"mode": None, "batch": []}
            if batch is None:
                self.new_token_ratio = self.first_ratio
            else:
                is_decode = batch.forward_mode.is_decode()
                decodes = batch.reqs if is_decode else batch.decoding_reqs or ()
                decision["mode"] = batch.forward_mode.name
                decision["batch"] = [
                    [r.rid, "decode", 1]
                    if r in decodes
                    else [r.rid, "extend", r.extend_input_len, "cached", len(r.prefix_indices)]
                    for r in batch.reqs
                ]
                self.process(batch, is_decode)
            self.last_batch = batch
            if self.driven_out:
                decision["driven_out"] = self.driven_out
            return decision | {
                "retracted": self.retracted,
                "finished": [r.rid for r in (batch.reqs if batch else ()) if r.finished()],
                "waiting": [r.rid for r in self.waiting_queue],
                "running": [r.rid for r in self.running_batch.reqs],
                "avail": self.token_to_kv_pool_allocator.available_size(),
                "evictable": self.tree_cache.evictable_size(),
                "ratio": round(self.new_token_ratio, 5),
                "full": self.running_batch.batch_is_full,
                "chunked": self.chunked_req.rid if self.chunked_req else None,
            }

        def next_batch(self) -> Any:
            released: list[Any] = []
            release = sglang.batch.ScheduleBatch.release_req

            def watched(batch: Any, index: int, *others: Any) -> None:
                released.append(batch.reqs[index])
                if released[-1].finished():
                    raise StopRecordingError
                InRunningOrder.running = ()
                release(batch, index, *others)

            adder = sglang.policy.PrefillAdder
            preempt = adder.preempt_to_schedule

            def ordered(this: Any, *args: Any) -> bool:
                InRunningOrder.running = this.running_batch.reqs
                return bool(preempt(this, *args))

            sglang.batch.ScheduleBatch.release_req = watched
            adder.preempt_to_schedule = ordered
            try:
                batch = self.get_next_batch_to_run()
            finally:
                sglang.batch.ScheduleBatch.release_req = release
                adder.preempt_to_schedule = preempt
            if len(released) > len(self.retracted) + len(self.driven_out):
                raise StopRecordingError
            if batch and any(r.extend_input_len < 1 for r in batch.reqs):
                raise StopRecordingError
            return batch

        def process(self, batch: Any, is_decode: bool) -> None:
            tokens = torch.full((len(batch.reqs),), 7, dtype=torch.int64)
            batch.output_ids = tokens
            result = SimpleNamespace(
                next_token_ids=tokens,
                can_run_cuda_graph=False,
                **dict.fromkeys(
                    (
                        *("copy_done", "logits_output", "extend_input_len_per_req"),
                        "extend_logprob_start_len_per_req",
                    )
                ),
            )
            mixin = sglang.output.SchedulerOutputProcessorMixin
            if is_decode:
                mixin.process_batch_result_decode(self, batch, result)
            else:
                mixin.process_batch_result_prefill(self, batch, result)

    return Recorded


def make_memory(
    sglang: SimpleNamespace, pool: Any, num_tokens: int, page_size: int, has_tree: bool
) -> Any:
    """Return an allocator of slots for `num_tokens` tokens, and the cache that knows their content."""
    memory = (torch.float16, "cpu", None)
    if page_size == 1:
        allocator = sglang.allocator.TokenToKVPoolAllocator(num_tokens, *memory, need_sort=False)
        return allocator, sglang.radix.RadixCache(pool, allocator, page_size=1)
    sglang.allocator.alloc_extend_kernel = OnCPU(write_extended)
    sglang.allocator.alloc_decode_kernel = OnCPU(write_decoded)
    allocator = sglang.allocator.PagedTokenToKVPoolAllocator(
        num_tokens, page_size, *memory, need_sort=False
    )
    if has_tree:
        return allocator, sglang.radix.RadixCache(pool, allocator, page_size=page_size)
    return allocator, sglang.chunk.ChunkCache(pool, allocator, page_size)


class OnCPU:
    """A replacement for a kernel: `kernel[grid](...)` calls `run` on the CPU."""

    def __init__(self, run: Callable[..., None]) -> None:
        self.run = run

    def __getitem__(self, _: Any) -> Callable[..., None]:
        return self.run


def write_extended(  # the arguments are those of the kernel
    before: Any, after: Any, last: Any, free_pages: Any, out: Any, _: int, page_size: int, __: int
) -> None:
    """Write the slots of each request's new tokens: after its last one, then in free pages."""
    slots, pages = [], iter(free_pages.tolist())
    for start, stop, slot in zip(before.tolist(), after.tolist(), last.tolist(), strict=True):
        for position in range(start, stop):
            is_new = position % page_size == 0
            slot = next(pages, 0) * page_size if is_new else slot + 1
            slots.append(slot)
    out[:] = torch.tensor(slots, dtype=out.dtype)


def write_decoded(after: Any, last: Any, free_pages: Any, out: Any, _: int, page_size: int) -> None:
    write_extended(after - 1, after, last, free_pages, out, 0, page_size, 0)


def make_paged_workload(seed: int) -> dict[str, Any]:
    rng = random.Random(seed)
    page = rng.choice([2, 4, 8, 16])
    config: dict[str, Any] = {
        "kv": rng.choice([96, 128, 192, 256]),
        "page": page,
        "max_running": rng.choice([2, 4, 8]),
        "chunk": rng.choice([-1, -1, page, 2 * page, 3 * page]),
        "max_prefill": rng.choice([16384, 64, 32]),
        "policy": rng.choice(["fcfs", "fcfs", "lof"]),
        "mixed": rng.random() < 0.3,
        "priority": False,
        "threshold": 10,
        "conserv": rng.choice([0.1, 0.3, 1.0]),
    }
    arrivals = [
        {
            "step": rng.choice([0, rng.randint(0, 30)]),
            "id": f"r{index}",
            "len": rng.randint(1, 40),
            "family": 1,
            "shared_len": 0,
            "max_tokens": rng.randint(1, 30),
            "priority": 0,
        }
        for index in range(rng.randint(4, 14))
    ]
    arrivals.sort(key=lambda arrival: arrival["step"])
    base = {"engine": "sglang", "version": "0.5.5", "seed": seed}
    return {**base, "config": config, "arrivals": arrivals}


def make_pages_workload(seed: int) -> dict[str, Any]:
    """Return a workload with shared prefixes that end within a page."""
    return with_prefixes(make_paged_workload(seed), ["fcfs", "lpm", "lpm", "dfs-weight"])


def make_newer_workload(seed: int) -> dict[str, Any]:
    """Return a workload for one of the newer orders; every second one has pages of one token."""
    workload = with_prefixes(make_paged_workload(seed), list(ORDERS))
    config = workload["config"]
    if seed % 2:
        config["page"] = 1
    if seed % 4 < 2:
        config["chunk"] = config["page"] * 4
    return workload


def with_prefixes(workload: dict[str, Any], orders: list[str]) -> dict[str, Any]:
    rng = random.Random(-1 - workload["seed"])
    workload["config"] |= {"policy": rng.choice(orders), "radix": True}
    for arrival in workload["arrivals"]:
        arrival["family"] = rng.randint(1, 3)
        if rng.random() < 0.3:
            most = workload["config"]["kv"] - arrival["max_tokens"]
            arrival["len"] = min(arrival["len"] + 30, most)
        arrival["shared_len"] = min(arrival["len"], rng.choice([0, 7, 16, 21, 35]))
    return workload


def make_workload(seed: int) -> dict[str, Any]:
    """Return a workload, in turn with preemption by priority, adapters, `dfs-weight` or `lpm`."""
    rng = random.Random(seed)
    kind = ("priority", "lora", "dfs-weight", "lpm")[seed % 4]
    is_long = kind == "lpm"
    chunk = rng.choice([-1, -1, 8, 16])
    config: dict[str, Any] = {
        "kv": rng.choice([250, 400] if is_long else [80, 120, 200]),
        "max_running": rng.choice([2, 3, 4, 8]),
        "chunk": chunk * 4 if is_long and chunk > 0 else chunk,
        "max_prefill": rng.choice([16384, 64, 32]),
        "policy": kind,
        "mixed": rng.random() < 0.3,
        "priority": kind == "priority",
        "threshold": rng.choice([0, 5, 10]),
        "conserv": rng.choice([0.1, 0.3, 1.0]),
    }
    if kind in ("priority", "lora"):
        config["policy"] = rng.choice(["fcfs", "lof"])
    if kind == "priority":
        config["low_first"] = rng.random() < 0.5
        config["max_running"] = rng.choice([2, 3])
    if kind == "lora":
        config["max_loras"] = rng.choice([1, 2])
    arrivals = []
    for index in range(rng.randint(4, 14)):
        length = rng.randint(1, 80 if is_long else 30)
        shared = rng.choice([0, 31, 32, 50] if is_long else [0, 8, 16, 24])
        arrival: dict[str, Any] = {
            "step": rng.randint(0, 40)
            if kind == "priority"
            else rng.choice([0, rng.randint(0, 30)]),
            "id": f"r{index}",
            "len": length,
            "family": rng.randint(1, 3),
            "shared_len": min(length, shared),
            "max_tokens": rng.randint(1, 30 if kind == "priority" else 20),
            "priority": rng.choice([0, 1, 5, 11, 20]) if kind == "priority" else 0,
        }
        if kind == "lora":
            arrival["lora"] = rng.choice([None, "x", "y", "z"])
        arrivals.append(arrival)
    arrivals.sort(key=lambda arrival: arrival["step"])
    base = {"engine": "sglang", "version": "0.5.5", "seed": seed}
    return {**base, "config": config, "arrivals": arrivals}


def play(sglang: SimpleNamespace, recorded: type, workload: dict[str, Any]) -> Iterator[Any]:
    """Yield the steps until all requests have ended, or the recording has to end."""
    scheduler = recorded(workload["config"])
    arrivals = workload["arrivals"]
    for step in range(MAX_STEPS):
        for place, arrival in enumerate(arrivals):
            if arrival["step"] == step:
                scheduler._add_request_to_queue(make_request(sglang, place, arrival))
        try:
            decision = scheduler.step()
        except (StopRecordingError, RuntimeError, AssertionError):
            return
        yield decision
        has_ended = decision["mode"] is None and not decision["waiting"]
        if has_ended and step > max(arrival["step"] for arrival in arrivals):
            return


def make_request(sglang: SimpleNamespace, place: int, arrival: dict[str, Any]) -> Any:
    ids = [
        100_000 * arrival["family"] + i if i < arrival["shared_len"] else 1000 * (place + 1) + i
        for i in range(arrival["len"])
    ]
    sampling = sglang.sampling.SamplingParams(max_new_tokens=arrival["max_tokens"])
    sampling.normalize(None)
    return sglang.batch.Req(
        *(arrival["id"], "", ids, sampling),
        priority=arrival["priority"],
        lora_id=arrival.get("lora"),
        vocab_size=1 << 30,
    )


def check_again(sglang: SimpleNamespace, recorded: type, path: Path) -> None:
    """Play the first workloads of a recording again, and assert that the steps are as recorded."""
    with gzip.open(path, "rt") as file:
        for line, _ in zip(file, range(NUM_AGAIN), strict=False):
            workload = json.loads(line)
            again = list(play(sglang, recorded, workload))
            common = min(len(again), len(workload["steps"]))
            assert common > 5, f"seed {workload['seed']}"
            assert again[:common] == workload["steps"][:common], f"seed {workload['seed']}"
    sys.stdout.write(f"{NUM_AGAIN} workloads of {path.name} came out again\n")


def main() -> None:
    sglang = prepare(Path(sys.argv[1]))
    sglang.adder = sglang.policy.PrefillAdder
    if sys.argv[2] == "newer":
        sglang.newer = load_orders(Path(sys.argv[1]).parent / "newer")
    recorded = make_scheduler_class(sglang)
    for path in map(Path, sys.argv[4:]):
        check_again(sglang, recorded, path)
    kinds = {
        "more": (160, make_workload),
        "paged": (35, make_paged_workload),
        "pages": (60, make_pages_workload),
        "newer": (60, make_newer_workload),
    }
    num_steps, (num_workloads, make) = 0, kinds[sys.argv[2]]
    with gzip.open(sys.argv[3], "wt") as file:
        for seed in range(num_workloads):
            workload = make(seed)
            workload["steps"] = list(play(sglang, recorded, workload))
            num_steps += len(workload["steps"])
            file.write(json.dumps(workload) + "\n")
    sys.stdout.write(f"{num_workloads} workloads, {num_steps} steps\n")


if __name__ == "__main__":
    main()
