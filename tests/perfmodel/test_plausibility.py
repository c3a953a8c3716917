"""Which backend's tables can be right for a model, by the real tables."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from aiconfigurator_tables import needs_tables

from slosched.perfmodel.aiconfigurator import Deployment, MissingTablesError, compose_profile
from slosched.perfmodel.aiconfigurator.plausibility import (
    TableCheck,
    check_tables,
    compare_backends,
    most_plausible,
)

LLAMA_2_7B = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "torch_dtype": "float16",
    "vocab_size": 32000,
}
"""The sizes of Llama-2-7b, as in its config.json on the Hugging Face hub."""
LLAMA_8B = "meta-llama/Meta-Llama-3.1-8B"

FINE = TableCheck("vLLM 1", 0.8, 2e12, 0.7, (1.0, 2.0, 3.0), ())
DOUBTFUL = replace(FINE, doubts=("too fast",))


def test_the_first_backend_without_a_doubt_is_chosen() -> None:
    assert most_plausible({"vllm": FINE, "sglang": FINE}) == "vllm"
    assert most_plausible({"vllm": DOUBTFUL, "sglang": FINE, "trtllm": FINE}) == "sglang"


def test_if_there_are_doubts_about_all_it_is_the_first() -> None:
    assert most_plausible({"vllm": DOUBTFUL, "sglang": DOUBTFUL}) == "vllm"


@pytest.fixture
def llama_2_7b(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_2_7B))
    return str(tmp_path)


@needs_tables
def test_vllm_was_not_measured_with_32_heads_that_share_no_keys(llama_2_7b: str) -> None:
    checks = compare_backends(Deployment("h100_sxm", llama_2_7b))
    assert most_plausible(checks) == "sglang"
    assert "the model has 32 on each GPU" in checks["vllm"].doubts[0]
    # Its attention is slower than that of the others, which were measured, and which agree.
    shares = {name: check.decode_bandwidth or 0.0 for name, check in checks.items()}
    assert shares["sglang"] == pytest.approx(shares["trtllm"], rel=0.05)
    assert shares["vllm"] < 0.75 * shares["sglang"]
    # With two GPUs, each has 16 of the heads, which were not measured either.
    assert check_tables(Deployment("h100_sxm", llama_2_7b, tensor_parallel=2)).doubts
    assert not check_tables(Deployment("h100_sxm", llama_2_7b, tensor_parallel=4)).doubts


@pytest.fixture
def mixtral(tmp_path: Path) -> str:
    sizes = {
        **LLAMA_2_7B,
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "intermediate_size": 14336,
        "num_experts_per_tok": 2,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
    }
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    return str(tmp_path)


@needs_tables
def test_experts_that_would_be_faster_with_idle_tokens_are_doubted(mixtral: str) -> None:
    checks = compare_backends(Deployment("h100_sxm", mixtral, tensor_parallel=2))
    for backend in ("vllm", "trtllm"):
        [doubt] = checks[backend].doubts
        assert doubt.startswith("experts take")
    assert most_plausible(checks) == "sglang"


@needs_tables
def test_a_profile_says_what_speaks_against_its_tables(llama_2_7b: str) -> None:
    said = compose_profile(Deployment("h100_sxm", llama_2_7b), num_steps=16).provenance
    assert "its time is extrapolated" in said["plausibility"]


@needs_tables
def test_no_kernel_reads_faster_than_the_memory() -> None:
    checks = compare_backends(Deployment("a100_sxm", LLAMA_8B))
    assert "no kernel gets beyond 95%" in checks["trtllm"].doubts[0]
    assert most_plausible(checks) == "vllm"


@needs_tables
@pytest.mark.parametrize("system", ["h100_sxm", "h200_sxm", "b200_sxm", "l40s"])
def test_nothing_speaks_against_llama_8b(system: str) -> None:
    check = check_tables(Deployment(system, LLAMA_8B))
    assert check.doubts == ()
    assert 0.4 < (check.decode_bandwidth or 0.0) < 0.95
    assert 0.4 < check.gemm_throughput < 0.95
    decodes_s, prefill_s, both_s = check.step_s
    assert max(decodes_s, prefill_s) < both_s < decodes_s + prefill_s


@needs_tables
def test_backends_without_tables_of_the_model_are_left_out() -> None:
    checks = compare_backends(Deployment("h200_sxm", "openai/gpt-oss-120b", "vllm", 2))
    assert set(checks) == {"vllm", "sglang"}
    assert checks["vllm"].doubts == (), "nothing speaks against its experts"
    with pytest.raises(MissingTablesError, match="h900"):
        compare_backends(Deployment("h900", LLAMA_8B))
