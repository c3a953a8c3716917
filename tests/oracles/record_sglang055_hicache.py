"""Record what SGLang 0.5.5's own HiRadixCache decides: writes `sglang055_hicache.jsonl.gz`.

    pip download sglang==0.5.5 --no-deps && pip install torch numpy transformers
    python -m zipfile -e sglang-0.5.5-*.whl unpacked
    python record_sglang055_hicache.py unpacked sglang055_hicache.jsonl.gz

The cache, its controller, the pools of both tiers and the allocator are SGLang's.  CUDA's streams and
events have stand-ins that end at once, and the kernel that copies slots is rewritten.  Around them
this file does what SGLang's scheduler does with its cache, for one request per step: it matches all
tokens but the last, locks them, loads tokens back, evicts and allocates, and caches what is
computed.  Every slot holds a hash of the tokens up to it, and the recording ends if a request would
read the content of another one.  This happens only in the one case that is tried first.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from sglang055_alone import Anything, prepare

NUM_WORKLOADS, NUM_STEPS, NUM_SEATS = 54, 60, 2
WANTED = ("sglang.srt.managers.cache_controller", "sglang.srt.mem_cache.memory_pool_host")


class SpoiltError(Exception):
    """The error raised when a request is about to read the content of another one."""


class Over:
    """A stand-in for a CUDA event or stream, whose work has always ended."""

    def query(self) -> bool:
        return True

    def record(self, *_: Any) -> None:
        pass

    wait = synchronize = record


def copy_slots(
    src_layers: list[Any], dst_layers: list[Any], src_indices: Any, dst_indices: Any, **_: Any
) -> None:
    """Copy slots between tiers, as the kernel of SGLang does."""
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices]


def load_sglang(unpacked: Path) -> SimpleNamespace:
    """Return SGLang's modules with the hierarchical cache, prepared to run on a CPU."""
    sglang = prepare(unpacked, WANTED)
    cuda: Any = torch.cuda
    cuda.Event = cuda.Stream = Over
    cuda.stream = contextlib.nullcontext
    cuda.cudart = Anything
    torch.distributed.get_world_size = lambda **_: 1
    import sglang.srt.mem_cache.hiradix_cache as hiradix  # type: ignore[import-not-found]
    import sglang.srt.mem_cache.memory_pool_host as host  # type: ignore[import-not-found]

    host.transfer_kv_direct = copy_slots
    host.psutil = SimpleNamespace(virtual_memory=lambda: SimpleNamespace(available=1 << 40))
    sglang.hiradix = hiradix
    return sglang


class Player:
    """Plays one workload with a cache of its own."""

    def __init__(self, sglang: SimpleNamespace, workload: dict[str, Any]) -> None:
        config = workload["config"]
        self.sglang, self.page = sglang, config["page"]
        self.prompts: list[list[int]] = workload["prompts"]
        self.slots = sglang.pools.ReqToTokenPool(64, 512, "cpu", enable_memory_saver=False)
        memory = (config["kv"], self.page, torch.int64)
        self.kv = sglang.pools.MHATokenToKVPool(*memory, 1, 1, 1, "cpu", enable_memory_saver=False)
        made = (torch.int64, "cpu", self.kv, False)
        if self.page == 1:
            self.allocator = sglang.allocator.TokenToKVPoolAllocator(config["kv"], *made)
        else:
            self.allocator = sglang.allocator.PagedTokenToKVPoolAllocator(
                config["kv"], self.page, *made
            )
        self.cache = sglang.hiradix.HiRadixCache(
            *(self.slots, self.allocator, None, self.page, config["host_ratio"], 0),
            *(config["writes"], "direct", "layer_first"),
            enable_metrics=False,
        )
        self.cache.load_back_threshold = config["least_load"]
        self.requests: dict[int, SimpleNamespace] = {}

    def run(self, place: int, num_tokens: int | None) -> dict[str, Any]:
        """Compute `num_tokens` of a prompt or all its rest; return what was found and loaded."""
        seen = {} if place in self.requests else self.start(place)
        request = self.requests[place]
        tokens, num_prior = self.prompts[place], len(request.prefix_indices)
        stop = len(tokens) if num_tokens is None else min(len(tokens), num_prior + num_tokens)
        table = self.slots.req_to_token[request.req_pool_idx]
        num_slots = -(-(stop - num_prior) // self.page) * self.page
        self.sglang.common.evict_from_tree_cache(self.cache, num_slots)
        table[num_prior:stop] = self.allocator.alloc(num_slots)[: stop - num_prior]
        self.cache.ready_to_load_host_cache()
        self.check_content(tokens, table[:num_prior])
        self.kv.k_buffer[0][table[num_prior:stop].long(), 0, 0] = content(tokens)[num_prior:stop]
        request.fill_ids = tokens[:stop]
        self.cache.cache_unfinished_req(request, chunked=stop < len(tokens))
        if stop < len(tokens):
            request.prefix_indices = request.prefix_indices[:stop]
        return {"computed": stop} | seen

    def start(self, place: int) -> dict[str, Any]:
        tokens = self.prompts[place]
        key = self.sglang.radix.RadixKey(tokens[:-1])
        found, last, last_host, num_on_host = self.cache.match_prefix(key)
        self.cache.inc_lock_ref(last)
        loaded, node = found[:0], last
        if num_on_host > 0:
            loaded, node = self.cache.init_load_back(last_host, num_on_host)
        self.cache.inc_lock_ref(node)
        self.cache.dec_lock_ref(last)
        [slot] = self.slots.alloc(1)
        prefix = torch.cat([found, loaded])
        self.slots.write((slot, slice(0, len(prefix))), prefix.int())
        self.requests[place] = SimpleNamespace(
            origin_input_ids=tokens,
            output_ids=[7],
            extra_key=None,
            req_pool_idx=slot,
            prefix_indices=prefix,
            last_matched_prefix_len=len(prefix),
            last_node=node,
        )
        return {"found": [len(found), num_on_host], "loaded": len(loaded)}

    def end(self, place: int) -> None:
        self.cache.cache_finished_req(self.requests.pop(place))

    def check_content(self, tokens: list[int], slots: Any) -> None:
        if not self.kv.k_buffer[0][slots.long(), 0, 0].equal(content(tokens)[: len(slots)]):
            raise SpoiltError

    def where(self, tokens: list[int]) -> tuple[int, int]:
        """Return how many of the first tokens are on the device, and how many on either tier."""
        node, num, on_device = self.cache.root_node, 0, 0
        while num < len(tokens) // self.page * self.page:
            rest = self.sglang.radix.RadixKey(tokens[num:])
            child = dict(node.children).get(self.cache.get_child_key_fn(rest))
            if child is None:
                break
            num_common = self.cache.key_match_fn(child.key, rest)
            num += num_common
            on_device += 0 if child.evicted else num_common
            if num_common < len(child.key):
                break
            node = child
        return on_device, num

    def state(self) -> dict[str, Any]:
        """Return the state of both tiers after all copies have ended."""
        self.cache.check_hicache_events()
        host = self.cache.token_to_kv_pool_host
        return {
            "empty": self.allocator.available_size(),
            "evictable": self.cache.evictable_size(),
            "host": host.size - host.available_size(),
            "where": [self.where(tokens) for tokens in self.prompts],
        }


def content(tokens: list[int]) -> Any:
    """Return a hash for each token that depends on it and on all tokens before it."""
    hashes = [hash(tuple(tokens[: end + 1])) for end in range(len(tokens))]
    return torch.tensor(hashes, dtype=torch.int64)


def make_workload(seed: int) -> dict[str, Any]:
    """Return a workload whose prompts share beginnings with earlier ones, then have own tokens."""
    rng = random.Random(seed)
    config = {
        "kv": rng.choice([80, 96, 128]),
        "page": (1, 1, 4)[seed % 3],
        "host_ratio": (1.25, 2.0, 8.0)[seed // 3 % 3],
        "writes": ("write_back", "write_through", "write_through_selective")[seed // 9 % 3],
        "least_load": rng.choice([10, 1]),  # 10 is SGLang's
    }
    prompts: list[list[int]] = []
    for place in range(16):
        like = rng.choice(prompts) if prompts and rng.random() < 0.7 else []
        begin = like[: rng.randint(0, len(like))]
        num_own = rng.randint(2, 25)
        own = range(1000 * place, 1000 * place + num_own)
        prompts.append([*begin, *own][:40])
    base = {"engine": "sglang", "version": "0.5.5", "seed": seed}
    return {**base, "config": config, "prompts": prompts}


def play(sglang: SimpleNamespace, workload: dict[str, Any]) -> list[dict[str, Any]]:
    """Return random steps, up to the first at which a request would read the content of another."""
    rng = random.Random(-1 - workload["seed"])
    player = Player(sglang, workload)
    steps: list[dict[str, Any]] = []
    running: dict[int, bool] = {}
    """For each running prompt, whether all of it is computed."""
    while len(steps) < NUM_STEPS:
        unfinished = [place for place, is_done in running.items() if not is_done]
        finished = [place for place, is_done in running.items() if is_done]
        others = [p for p in range(len(player.prompts)) if p not in running]
        step: dict[str, Any]
        if finished and (len(running) == NUM_SEATS or rng.random() < 0.5) and not unfinished:
            step = {"end": rng.choice(finished)}
            player.end(step["end"])
            del running[step["end"]]
        else:
            can_start = not unfinished and len(running) < NUM_SEATS
            place = rng.choice(others) if can_start else unfinished[0]
            num_tokens = rng.choice([None, None, 8, 16])
            try:
                step = {"run": place} | player.run(place, num_tokens)
            except SpoiltError:
                break
            running[place] = step["computed"] == len(player.prompts[place])
        steps.append(step | player.state())
    return steps


def spoils_what_it_loads(sglang: SimpleNamespace) -> bool:
    """Tell whether loading from a full host loses its own data to a write-back that makes room.

    A prompt of 24 tokens returns while the host has room for 2 more tokens and the device for 10.
    """
    config = {"kv": 40, "page": 1, "host_ratio": 1.25, "writes": "write_back", "least_load": 10}
    first, second, third = list(range(24)), list(range(100, 124)), list(range(200, 230))
    prompts = [first, second, third, [*first, 500]]
    player = Player(sglang, {"config": config, "prompts": prompts})
    for place in range(3):
        player.run(place, None)
        player.end(place)
    try:
        player.run(3, None)
    except SpoiltError:
        return True
    return False


def main() -> None:
    sglang = load_sglang(Path(sys.argv[1]))
    if spoils_what_it_loads(sglang):
        sys.stdout.write(
            "a full host gives away what a prompt is about to load: it reads another's\n"
        )
    num_steps = 0
    with gzip.open(sys.argv[2], "wt") as file:
        for seed in range(NUM_WORKLOADS):
            workload = make_workload(seed)
            workload["steps"] = play(sglang, workload)
            num_steps += len(workload["steps"])
            file.write(json.dumps(workload) + "\n")
    sys.stdout.write(f"{NUM_WORKLOADS} workloads, {num_steps} steps\n")


if __name__ == "__main__":
    main()
