"""The distribution from which a token is drawn, against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from slosched.core import SamplingParams
from slosched.engine.torch.sampling import next_token_weights

torch.set_num_threads(1)

LOGITS = torch.tensor([math.log(p) for p in (0.1, 0.4, 0.2, 0.3)])


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (SamplingParams(temperature=1.0), [0.1, 0.4, 0.2, 0.3]),
        # Half the temperature squares the odds.
        (SamplingParams(temperature=0.5), [1 / 30, 16 / 30, 4 / 30, 9 / 30]),
        (SamplingParams(temperature=1.0, top_k=2), [0, 4 / 7, 0, 3 / 7]),
        (SamplingParams(temperature=1.0, top_k=9), [0.1, 0.4, 0.2, 0.3]),
        # 0.4 + 0.3 is the smallest set of at least 0.6; for 0.75 a third is needed.
        (SamplingParams(temperature=1.0, top_p=0.6), [0, 4 / 7, 0, 3 / 7]),
        (SamplingParams(temperature=1.0, top_p=0.75), [0, 4 / 9, 2 / 9, 3 / 9]),
        (SamplingParams(temperature=1.0, top_p=0.0), [0, 1, 0, 0]),
        # Top-k first: within {4/7, 3/7}, 0.5 needs only the first.
        (SamplingParams(temperature=1.0, top_k=2, top_p=0.5), [0, 1, 0, 0]),
    ],
)
def test_probabilities(sampling: SamplingParams, expected: list[float]) -> None:
    weights = next_token_weights(LOGITS, sampling)
    torch.testing.assert_close(weights / weights.sum(), torch.tensor(expected, dtype=torch.float32))
