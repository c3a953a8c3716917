"""The floating-point type in which a CPU computes faster, which is measured because no rule holds.

bfloat16 halves the memory traffic, but without AMX or AVX512-BF16 its matrix products are several
times slower than those of float32.
"""

from __future__ import annotations

import functools
import math
import time

import torch
from torch import nn

from slosched.engine.torch.packed_linear import pack_linears

_BATCH_SIZES = (1, 8, 128)
"""A single decode, some decodes, and a prefill chunk."""
_SECONDS_EACH = 0.15


@functools.cache
def fastest_cpu_dtype() -> torch.dtype:
    """Return float32 or bfloat16, whichever multiplies matrices of serving shapes faster.

    Measures for about 1 s on the first call.
    """
    return min((torch.float32, torch.bfloat16), key=_log_seconds)


def _log_seconds(dtype: torch.dtype) -> float:
    """Return the sum of log best times over batch sizes, so that all sizes weigh the same."""
    # More weights than any cache holds, as in a model, where all layers run between two uses of
    # one.
    layers = nn.Sequential(*(nn.Linear(1024, 1024, bias=False, dtype=dtype) for _ in range(32)))
    pack_linears(layers)
    total = 0.0
    for batch_size in _BATCH_SIZES:
        hidden = torch.ones((batch_size, 1024), dtype=dtype)
        best_s = math.inf
        end_s = time.perf_counter() + _SECONDS_EACH
        while time.perf_counter() < end_s:
            start_s = time.perf_counter()
            with torch.inference_mode():
                for layer in layers:
                    layer(hidden)
            best_s = min(best_s, time.perf_counter() - start_s)
        total += math.log(best_s)
    return total
