"""The setups that are played in virtual time: more parts, loads and policies than in real time."""

from __future__ import annotations

import json
from dataclasses import replace

from experiments.arena.results import Results
from experiments.inside_vllm.setups import SETUPS, Setup, System

_OURS = ("goodput", "goodput+door", "slo_aware")


def _virtual(setup: Setup, rates: tuple[float, ...], budgets: tuple[int, ...]) -> Setup:
    return replace(
        setup,
        title=f"{setup.title}, in virtual time",
        rates=rates,
        budgets=budgets,
        slowdown=1.0,
        num_parts=30,
        first_tuning_part=60,
        num_tuning_parts=8,
        policies=_OURS,
    )


_CONVERSATIONS = SETUPS["conv-h100"]
_BUDGETS = (512, 768, 1024, 2048, 8192)

VIRTUAL_SETUPS = {
    setup.name: setup
    for setup in (
        _virtual(_CONVERSATIONS, (14.0, 20.0, 28.0, 40.0), _BUDGETS),
        _virtual(SETUPS["code-h100"], (2.5, 4.5, 6.0, 9.0), (256, *_BUDGETS)),
        _virtual(
            replace(
                _CONVERSATIONS,
                name="mooncake-h100",
                title="Mooncake's conversations on an emulated H100 (8B)",
                trace="mooncake_conversation.jsonl",
                num_requests=100,
                base_s=5.0,
                tpot_s=0.1,
                max_model_len=131_072,
            ),
            (1.0, 1.7, 2.5, 3.5),
            _BUDGETS,
        ),
    )
}
"""The first rate lies below vLLM's knee, which is near the second one."""

SCENARIOS = {
    "conv-h100": "conv-tight",
    "code-h100": "code-tight",
    "mooncake-h100": "mooncake-relaxed-h100",
}
"""The arena's scenario with the same device, trace and promises."""


def with_finalists(setup: Setup) -> Setup:
    """Return the setup with the arena's finalists besides ours, with their tuned options.

    They are those of the arena's committed results whose capacity was measured.
    """
    results, scenario = Results(), SCENARIOS[setup.name]
    capacities = results.of("capacity", scenario)
    names = set(capacities[capacities["class"] != "ours"]["contender"])
    tuned = results.of("tuned", scenario)
    rivals = [
        System(
            int(json.loads(row["limits"]).get("max_num_batched_tokens", setup.policy_budget)),
            str(row["tuned"]),
        )
        for row in tuned[tuned["contender"].isin(names)].to_dict("records")
    ]
    return replace(setup, rivals=tuple(rivals))
