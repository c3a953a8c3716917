"""The variant of goodput that starts short prompts alone while more want KV blocks than there are."""

from __future__ import annotations

import numpy as np

from experiments.goodput.lasting_flood import POLICIES, Traffic

FLOOD = Traffic("h100/llama-3.1-8b", "sharegpt", 300, 60, 300)


def mean_prompt_started(name: str) -> float:
    """Return the mean prompt of the requests that got a token in a flood."""
    requests = FLOOD.played(POLICIES[name])
    return float(np.mean([r.num_prompt_tokens for r in requests if r.token_times_s]))


def test_shorter_prompts_start_in_a_flood_of_blocks() -> None:
    usual = mean_prompt_started("`goodput`")
    assert mean_prompt_started("at once") < 0.9 * usual
    assert mean_prompt_started("1.0") == usual, "those that have begun do not need so much"


def test_nothing_changes_while_there_is_room_for_all() -> None:
    roomy = FLOOD._replace(num_requests=60, num_blocks=30_000)
    assert roomy.num_good(POLICIES["at once"]) == roomy.num_good("goodput") == 60
