"""The prompts of a replay: random token ids that are plain in every vocabulary."""

from __future__ import annotations

import numpy as np

PLAIN_IDS = (100, 1000)
"""The range of ids, without its end, that are ordinary tokens in every vocabulary."""


def plain_prompt(
    num_tokens: int, index: int, seed: int = 0, token_range: tuple[int, int] = PLAIN_IDS
) -> list[int]:
    """Return the prompt of the request at `index` of a trace, always the same for the same seed."""
    ids: list[int] = (
        np.random.default_rng([seed, index]).integers(*token_range, num_tokens).tolist()
    )
    return ids
