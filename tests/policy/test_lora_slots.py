"""A prompt whose adapter finds no slot in the step is passed over, whatever the policy."""

from __future__ import annotations

import pytest
from views import FLAT, R, decode, view_of

from slosched.core import Limits
from slosched.policy.spec import make_policy

PASSING_OVER = ("sarathi", "edf", "sjf", "vllm_v1", "vllm_v0:enable_chunked_prefill=true", "trtllm")
PASSING_OVER += ("slo_aware", "goodput", "qoserve", "fairbatching", "slidebatching")
PASSING_OVER += ("slosserve", "jitserve", "medha_lars", "scorpio", "sola", "vtc")


def planned(name: str, num_other_tokens: int, **kv: int) -> set[str]:
    """Return what is planned; the decode has the only slot, and the first prompt needs another."""
    running = decode("decode", 100, slack_ms=50)
    running.lora_id = "x"
    queue = [
        running,
        R("other", num_other_tokens, due_s=1.0, lora_id="y"),
        R("same", 200, due_s=2.0, lora_id="x"),
        R("none", 300, due_s=2.0),
    ]
    view = view_of(queue, FLAT, limits=Limits(max_loras=1), **kv)
    return {*make_policy(name).schedule(view).num_scheduled_tokens}


@pytest.mark.parametrize("name", PASSING_OVER)
def test_a_prompt_without_a_slot_keeps_nobody_out(name: str) -> None:
    assert planned(name, 100) == {"decode", "same", "none"}


@pytest.mark.parametrize(
    "name", ["slo_aware", "slo_aware_literal", "slidebatching", "fairbatching", "goodput"]
)
def test_a_prompt_without_a_slot_takes_no_kv_blocks_from_others(name: str) -> None:
    """1,000 blocks of one token: the decode has 99 and takes one, and the others want 1,100."""
    assert planned(name, 600, num_blocks=1000) == {"decode", "same", "none"}
