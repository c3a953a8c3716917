"""The time to sample with top-p, which AIConfigurator's tables lack.

For top-p, vLLM 0.15 sorts the logits of all requests of a step with PyTorch, the whole vocabulary
on each GPU.  vLLM's developers measured sort and mask (github.com/vllm-project/vllm/pull/...):

| pull request | GPU | requests | vocabulary | measured | here |
|---|---|---|---|---|---|
| 42191 | H100 | 4 | 131,072 | 0.34 and 0.74 ms | 0.19 ms |
| 33538 | not named, of the author of 42191 | 48 | 32,768 | 0.35 and 0.99 ms | 0.38 ms on an H100 |
| 33538 | the same | 48 | 131,072 | 1.20 and 1.22 ms | 1.21 ms on an H100 |
| 51507 | H200 | 64 | 131,072 | 1.13 ms | 1.13 ms |
| 54502 | GB200 | 64 | 160,000 | 0.75 ms for top-k, which sorts, too | 0.86 ms |
| 51507 | H200 | 128 | 131,072 | 4.18 ms | 2.17 ms |

Where there are two times, the same shape was measured twice, with top-p for all and for half of the
requests, which sorts the same.  From 128 requests on, PyTorch sorts them in another way, which is
slower than this formula at 128 requests and faster at 512.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

_LAUNCHES_S = 1e-4
_BYTES_PER_LOGIT = 590
"""Bytes of memory traffic that would take as long as sorting and masking a logit.

Counted in the operations it is half of that: four passes over keys and indices, one over the
requests' numbers, and gathering, softmax, sum, mask and scatter.
"""

TOP_P_SAID = (
    "top-p: sorting the logits takes 0.1 ms a step, and for each logit as long as 590 bytes of "
    "memory traffic, by vLLM's developers' measurements on H100 and H200"
)


@dataclass(frozen=True)
class TopPSampling:
    """The sorting of logits on a GPU."""

    vocabulary: int
    bytes_per_s: float
    """The bandwidth of the GPU's memory."""

    def seconds(self, num_requests: int) -> float:
        """Return the seconds that sampling for so many requests takes."""
        num_bytes = num_requests * self.vocabulary * _BYTES_PER_LOGIT
        return _LAUNCHES_S + num_bytes / self.bytes_per_s


def asks_for_top_p(folder: Path) -> bool | None:
    """Return whether a model's generation_config.json sets top-p, which vLLM follows by default.

    Returns None if the folder has no such file.  Raises ValueError if it cannot be read.
    """
    path = folder / "generation_config.json"
    if not path.is_file():
        return None
    try:
        top_p = json.loads(path.read_text(encoding="utf-8")).get("top_p")
        return top_p is not None and float(top_p) < 1.0
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} does not say whether top-p is used: {error}; mend the file, or give "
            "--sampling greedy or --sampling top-p"
        ) from error
