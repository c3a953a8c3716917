"""Step times beside the least that memory and arithmetic allow, and how long the device works."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median

import torch
from torch.profiler import ProfilerActivity

from profiling.gpu.models import fastest, free_memory
from profiling.gpu.results import Rows
from profiling.gpu.scale import Scale
from slosched.cli.local_model import LocalModel
from slosched.core import BatchShape, Request, ScheduledBatch, ScheduledChunk
from slosched.engine.torch import LoadedModel
from slosched.kv import KVCache
from slosched.perfmodel.measurement import Chunk

_WARM_UPS = 3
_REPEATS = 7
_COLUMNS = (
    *("step", "sequences", "new_tokens", "context_tokens", "graphs"),
    *("seconds", "overlapped_s", "memory_roofline_s", "compute_roofline_s", "device_busy_share"),
)


def measure_rooflines(scale: Scale, out: Path) -> None:
    """Measure the peaks of this device's memory and arithmetic, then steps of each kind.

    Steps are measured with CUDA graphs and without them.  Each step is measured one by one, where
    it waits for the host, and overlapped, where the next one is launched before it has ended.
    """
    name, model = fastest(scale, out)
    block_size = int(model.provenance["block_size"])
    rows = Rows(out / "roofline.csv", _COLUMNS, num_keys=5)
    peaks: tuple[float, float] | None = None
    for graphs in ("none", scale.model.graph_sizes):
        local = scale.open(name, block_size, graphs)
        peaks = peaks or _peaks(local.loaded, scale.peak_size, out)
        _measure(scale, local, rows, *peaks)
        del local  # there is no room for two models
        free_memory()


def _measure(
    scale: Scale, local: LocalModel, rows: Rows, bytes_per_s: float, flops_per_s: float
) -> None:
    """Measure the steps that are still missing with this model's graphs."""
    loaded = local.loaded
    limits = local.profile_limits(scale.limits, scale.max_context_tokens)
    for step, chunks in _steps(scale):
        new, prior = chunks[0]
        key = (step, len(chunks), new, new + prior, "on" if local.graph_sizes else "off")
        if key in rows or not limits.fits(chunks):
            continue
        batch = _batch(local, chunks)
        seconds = _median_s(partial(local.executor.execute, batch), loaded.device)
        rows.add(
            *(*key, seconds, _overlapped_s(local, batch)),
            _num_bytes(loaded, chunks) / bytes_per_s,
            _num_flops(loaded, chunks) / flops_per_s,
            _busy_s(local, batch) / seconds,
        )


def _overlapped_s(local: LocalModel, batch: ScheduledBatch) -> float:
    """Return the seconds of a step in a row of steps, each launched before the last has ended."""
    seconds = 0.0
    for count in (_WARM_UPS, _REPEATS):
        start_s = time.perf_counter()
        waiting = local.executor.launch(batch)
        for _ in range(count - 1):
            following = local.executor.launch(batch)
            waiting()
            waiting = following
        waiting()
        seconds = (time.perf_counter() - start_s) / count
    return seconds


def _steps(scale: Scale) -> Iterator[tuple[str, tuple[Chunk, ...]]]:
    for context in scale.roofline_contexts:
        for count in scale.roofline_decodes:
            yield "decode", ((1, context - 1),) * count
    for new in scale.roofline_chunks:
        yield "chunk", ((new, 0),)


def _batch(local: LocalModel, chunks: tuple[Chunk, ...]) -> ScheduledBatch:
    kv = KVCache(local.num_blocks, local.block_size)
    scheduled, shape = [], BatchShape()
    for i, (new, prior) in enumerate(chunks):
        request = Request(f"roofline-{i}", 0.0, num_prompt_tokens=prior + new, max_tokens=1)
        table = kv.grow(request.request_id, prior + new)
        scheduled.append(ScheduledChunk(request, new, prior, True, table))
        shape.add(new, prior)
    return ScheduledBatch(chunks=tuple(scheduled), swap_out=(), swap_in=(), shape=shape)


def _num_bytes(loaded: LoadedModel, chunks: tuple[Chunk, ...]) -> int:
    """Return the bytes that a step must at least move: weights, and keys and values.

    Of the table of embeddings, a step reads only the rows of its tokens.
    """
    embeddings = loaded.model.get_input_embeddings().weight
    weights = sum(p.nbytes for p in loaded.model.parameters()) - embeddings.nbytes
    cached = sum(new + prior for new, prior in chunks)
    return int(weights + cached * loaded.geometry.bytes_per_token)


def _num_flops(loaded: LoadedModel, chunks: tuple[Chunk, ...]) -> int:
    """Return the operations of a step: products with the weights, and attention.

    Logits are computed only for the last token of each sequence.
    """
    config, model = loaded.model.config, loaded.model
    embeddings = model.get_input_embeddings().weight.numel()
    head = model.get_output_embeddings().weight.numel()
    of_layers = sum(p.numel() for p in model.parameters()) - embeddings - head
    new_tokens = sum(new for new, _ in chunks)
    seen = sum(new * prior + new * (new + 1) // 2 for new, prior in chunks)
    width = config.num_attention_heads * loaded.geometry.head_dim
    attention = 4 * config.num_hidden_layers * width * seen
    return int(2 * of_layers * new_tokens + 2 * head * len(chunks) + attention)


def _peaks(loaded: LoadedModel, size: int, out: Path) -> tuple[float, float]:
    """Return the bytes/s of copies in the device's memory, and the FLOP/s of a matrix product."""
    device = loaded.device
    matrix = torch.randn(size, size, dtype=loaded.dtype, device=device)
    source = torch.zeros(4 * size * size, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    bytes_per_s = 2 * source.nbytes / _median_s(lambda: target.copy_(source), device)
    flops_per_s = 2 * size**3 / _median_s(lambda: matrix @ matrix, device)
    rows = Rows(out / "peaks.csv", ("bytes_per_s", "flops_per_s"), num_keys=0)
    rows.add(bytes_per_s, flops_per_s)
    return bytes_per_s, flops_per_s


def _median_s(run: Callable[[], object], device: torch.device) -> float:
    times_s = []
    for _ in range(_WARM_UPS + _REPEATS):
        start_s = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times_s.append(time.perf_counter() - start_s)
    return median(times_s[_WARM_UPS:])


def _busy_s(local: LocalModel, batch: ScheduledBatch) -> float:
    """Return the seconds that kernels run in one step; NaN on a CPU, which has none.

    Kernels of one step run one after the other, so their times add up.
    """
    if local.loaded.device.type != "cuda":
        return float("nan")
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as found:
        local.executor.execute(batch)
    # Events of the host, such as launches, would count the kernels that they launch once more.
    events = (e for e in found.key_averages() if e.device_type.name == "CUDA")
    return float(sum(event.self_device_time_total for event in events)) / 1e6
