"""The range of steps that a latency model was fitted to, and whether a replica stays in it."""

from __future__ import annotations

from collections.abc import Mapping

from slosched.perfmodel.measurement import Profile
from slosched.perfmodel.model import FittedModel

LARGEST_STEP_TOKENS = "largest_step_tokens"
"""The provenance's key for the most tokens of a step that was fitted."""


def with_range(profile: Profile) -> Mapping[str, str]:
    """Return the provenance of a profile with its largest step, unless it says that itself."""
    told = profile.provenance.get(LARGEST_STEP_TOKENS)
    largest = max(sum(new for new, _ in m.chunks) for m in profile.measurements)
    return {**profile.provenance, LARGEST_STEP_TOKENS: told or str(largest)}


def beyond_range(model: FittedModel, max_num_batched_tokens: int) -> str | None:
    """Return a sentence if steps may be larger than any that the model was fitted to, or None.

    A model that does not say how large those were passes.
    """
    largest = model.provenance.get(LARGEST_STEP_TOKENS)
    if largest is None or max_num_batched_tokens <= int(largest):
        return None
    return (
        f"steps of up to {max_num_batched_tokens} tokens are longer than any that the latency "
        f"model was fitted to ({largest}), so their times are extrapolated; "
        f"--max-num-batched-tokens {largest} stays in its range"
    )
