"""A profile of a mixture of experts says how many experts there are, by three families' names."""

from __future__ import annotations

import pytest
from transformers import DeepseekV3Config, LlamaConfig, MixtralConfig, PretrainedConfig
from transformers import Qwen3MoeConfig as QwenConfig

from slosched.cli.local_model import expert_facts


@pytest.mark.parametrize(
    ("config", "num_experts", "per_token"),
    [
        (MixtralConfig(num_local_experts=8, num_experts_per_tok=2), "8", "2"),
        (QwenConfig(num_experts=64, num_experts_per_tok=4), "64", "4"),
        (DeepseekV3Config(n_routed_experts=256, num_experts_per_tok=8), "256", "8"),
    ],
    ids=["Mixtral", "Qwen3", "DeepSeek-V3"],
)
def test_experts_are_counted(config: PretrainedConfig, num_experts: str, per_token: str) -> None:
    said = expert_facts(config)
    assert said == {"num_experts": num_experts, "num_experts_per_token": per_token}


def test_a_dense_model_says_nothing_of_experts() -> None:
    assert expert_facts(LlamaConfig()) == {}
