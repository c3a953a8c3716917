"""The policies that are held to the laws, with options that do something in small scenarios."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from changeable import changing_over

from slosched.core import Policy, Request
from slosched.policy import (
    EDF,
    FCFS,
    POLICIES,
    SJF,
    VLLMV0,
    VLLMV1,
    Door,
    Floors,
    Goodput,
    JITServe,
    Sarathi,
    SGLang,
    SLOAware,
)
from slosched.policy.kit.drop import Drop
from slosched.policy.slo_aware import EarlyReject
from slosched.policy.spec import make_policy


class FloorOfOdd(Floors):
    """A floor for the requests with an odd number of prompt tokens."""

    def classes_of(self, request: Request) -> tuple[str, ...]:
        return ("tier odd",) if request.num_prompt_tokens % 2 else ()


VARIANTS: dict[str, Callable[[], Policy]] = {
    **POLICIES,
    "fcfs, drop expired": partial(FCFS, drop=Drop.EXPIRED),
    "sarathi, drop infeasible": partial(Sarathi, token_budget=24, drop=Drop.INFEASIBLE),
    "edf, drop infeasible": partial(EDF, token_budget=24, drop=Drop.INFEASIBLE),
    "sjf, drop expired": partial(SJF, token_budget=24, drop=Drop.EXPIRED),
    "slo_aware, margin": partial(
        SLOAware, early_reject=EarlyReject.OFF, expire_begun=False, margin=0.25
    ),
    "goodput, floor": lambda: FloorOfOdd(Goodput(), tiers="odd=0.3"),
    "jitserve, floor": lambda: FloorOfOdd(JITServe(), tiers="odd=0.9"),
    "vllm_v0, floor": lambda: FloorOfOdd(VLLMV0(), tiers="odd=0.6", turn_tokens=5),
    "vllm_v1, floor": lambda: FloorOfOdd(VLLMV1(), tiers="odd=0.6", turn_tokens=12),
    "sglang, floor, door": lambda: Door(FloorOfOdd(SGLang(), tiers="odd=0.2")),
    "portfolio, changes over": partial(changing_over, "goodput", "vllm_v0", "slidebatching"),
    "portfolio, changes to stateful": partial(
        changing_over, "qoserve", "vtc", "scorpio", "jitserve", "slosserve"
    ),
    **{
        spec: partial(make_policy, spec)
        for spec in (
            "fairbatching:deadlines=run,margin=0.1",
            "slidebatching:deadlines=run,min_chunk_tokens=4",
            "slai:token_budget=24",
            "vllm_v1:policy=priority,long_prefill_token_threshold=5,watermark=0.1",
            "vllm_v1:scheduler_reserve_full_isl=false,enable_chunked_prefill=false",
            "vllm_v1:prefill_schedule_interval=3,max_num_active_seqs=3",
            "vllm_ppas:capped_tokens=6",
            "vllm_residual_sjf:max_wait_s=0.5,cache_aware=false",
            "vllm_slo:priority_bias=3,short_request_token_threshold=12,max_model_len=64",
            "slosserve:admission=dp",
            "sglang:enable_mixed_chunk=true,chunked_prefill_size=16,schedule_policy=lpm",
            "sglang:enable_priority_scheduling=true,max_queued_requests=2",
            "sglang:schedule_policy=hrrn",
            "sglang:schedule_policy=shortest-prefill-first,chunked_prefill_size=8",
            "sarathi:token_budget=24+early_rejection:prior_decode_s=0.05",
            "edf+past_future:prior_output_tokens=8",
            "edf+door",
            "goodput+door:most_late=0.02",
            "slo_aware+past_future:prior_output_tokens=4,reserve=0.2+early_rejection:max_load=0.8",
        )
    },
}

_OWN_BUDGET = "its own budget, of fewer tokens than the step's"
_PROMPTS_OR_DECODES = "a step holds either prompts or decodes"
_TURN = "in the turn of a class no prompt of another starts"
LEAVES_ROOM: dict[str, str] = {
    "goodput, floor": _TURN,
    "jitserve, floor": _TURN,
    "vllm_v0, floor": _TURN,
    "vllm_v1, floor": _TURN,
    "sglang, floor, door": _TURN,
    "vllm_v0": _PROMPTS_OR_DECODES,
    "trtllm": "a prompt that does not fit into the step as a whole waits, and all behind it",
    "sglang": _PROMPTS_OR_DECODES,
    "sarathi, drop infeasible": _OWN_BUDGET,
    "edf, drop infeasible": _OWN_BUDGET,
    "sjf, drop expired": _OWN_BUDGET,
    "slai:token_budget=24": _OWN_BUDGET,
    "sarathi:token_budget=24+early_rejection:prior_decode_s=0.05": _OWN_BUDGET,
    "vllm_v1:policy=priority,long_prefill_token_threshold=5,watermark=0.1": "short chunks",
    "vllm_v1:scheduler_reserve_full_isl=false,enable_chunked_prefill=false": "whole prompts only",
    "vllm_v1:prefill_schedule_interval=3,max_num_active_seqs=3": "prompts wait for their interval",
    "vllm_ppas:capped_tokens=6": "few tokens for prompts while several of them and a decode compete",
    "sglang:enable_mixed_chunk=true,chunked_prefill_size=16,schedule_policy=lpm": "short chunks",
    "sglang:enable_priority_scheduling=true,max_queued_requests=2": _PROMPTS_OR_DECODES,
    "sglang:schedule_policy=hrrn": _PROMPTS_OR_DECODES,
    "sglang:schedule_policy=shortest-prefill-first,chunked_prefill_size=8": _PROMPTS_OR_DECODES,
}
"""The policies that leave tokens or seats unused on purpose while requests wait, and why."""

_TIGHTEST_BINDS = "the tightest slack or TPOT limits the step, kept or not"
PAYS_FOR_UNKEEPABLE: dict[str, str] = {
    "slo_aware_literal": _TIGHTEST_BINDS,
    "slo_aware:late=bind": _TIGHTEST_BINDS,
    "qoserve": _TIGHTEST_BINDS,
    "fairbatching": _TIGHTEST_BINDS,
    "scorpio": "a prompt starts only if a step is then within the smallest TPOT, kept or not",
}
"""The policies in which promises that cannot be kept cost other requests theirs, and why."""
