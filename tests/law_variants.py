"""The policies that are held to the laws, with options that do something in small scenarios."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from slosched.core import Policy
from slosched.policy import EDF, FCFS, POLICIES, SJF, Sarathi, SLOAware
from slosched.policy.kit.drop import Drop
from slosched.policy.slo_aware import EarlyReject, LateRule
from slosched.policy.spec import make_policy

VARIANTS: dict[str, Callable[[], Policy]] = {
    **POLICIES,
    "fcfs, drop expired": partial(FCFS, drop=Drop.EXPIRED),
    "sarathi, drop infeasible": partial(Sarathi, token_budget=24, drop=Drop.INFEASIBLE),
    "edf, drop infeasible": partial(EDF, token_budget=24, drop=Drop.INFEASIBLE),
    "sjf, drop expired": partial(SJF, token_budget=24, drop=Drop.EXPIRED),
    "slo_aware, bind": partial(
        SLOAware, late=LateRule.BIND, early_reject=EarlyReject.ROUND, min_chunk_tokens=4
    ),
    "slo_aware, margin": partial(
        SLOAware, early_reject=EarlyReject.OFF, expire_begun=False, margin=0.25
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
            "slosserve:admission=dp",
            "sglang:enable_mixed_chunk=true,chunked_prefill_size=16,schedule_policy=lpm",
            "sglang:enable_priority_scheduling=true,max_queued_requests=2",
            "sglang:schedule_policy=hrrn",
            "sglang:schedule_policy=shortest-prefill-first,chunked_prefill_size=8",
            "sarathi:token_budget=24+early_rejection:prior_decode_s=0.05",
            "edf+past_future:prior_output_tokens=8",
            "slo_aware+past_future:prior_output_tokens=4,reserve=0.2+early_rejection:max_load=0.8",
        )
    },
}
