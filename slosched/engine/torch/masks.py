"""Masks of allowed tokens, applied to some rows of a batch's logits on their device."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor


def apply_masks(logits: Tensor, masks: Mapping[int, bytes]) -> None:
    """Set the logits of the tokens that `masks` rule out to minus infinity.

    `logits` is [rows, vocabulary]; `masks` has the mask of some rows, as `GrammarState.mask`
    returns it.  Only those rows are read and written, and their masks are one copy to the device.
    """
    vocab_size = logits.shape[1]
    num_bytes = -(-vocab_size // 8)
    packed = np.zeros((len(masks), num_bytes), np.uint8)
    for one, mask in zip(packed, masks.values(), strict=True):
        known = np.frombuffer(mask, np.uint8)[:num_bytes]
        one[: len(known)] = known
    bits = torch.from_numpy(packed).to(logits.device)
    shifts = torch.arange(8, dtype=torch.uint8, device=logits.device)
    is_allowed = ((bits[:, :, None] >> shifts) & 1).flatten(1)[:, :vocab_size].bool()
    rows = torch.tensor(list(masks), device=logits.device)
    logits[rows] = logits[rows].masked_fill(~is_allowed, float("-inf"))
