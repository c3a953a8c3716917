"""Steps composed from operator times: sums are right, and the real tables give the CSV files."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from aiconfigurator_tables import needs_tables

from slosched.perfmodel import fit, read_profile
from slosched.perfmodel.aiconfigurator import (
    ConfigMissingError,
    Deployment,
    MissingTablesError,
    NoRoomError,
    OperatorTables,
    OperatorTime,
    asks_for_top_p,
    compose_profile,
    system_of,
)
from slosched.perfmodel.aiconfigurator.compose import layer_batches
from slosched.perfmodel.aiconfigurator.package import compile_model
from slosched.perfmodel.aiconfigurator.sampling import TopPSampling
from slosched.perfmodel.measurement import Measurement, Part
from slosched.perfmodel.memory import kv_memory
from slosched.perfmodel.stress import StressLimits

FOLDER = Path(__file__).parents[2] / "profiling" / "aiconfigurator"
CSVS = sorted(FOLDER.glob("*/*.csv"))


class Formulas:
    """An engine whose operators have prices that can be added up by hand, in milliseconds."""

    PREFILL = ("context_embedding", "context_attention", "context_ffn", "context_logits_gemm")
    DECODE = ("generation_attention", "generation_ffn", "generation_logits_gemm")

    def evaluate_context_ops(
        self, indices: list[int], *, batch_size: int, s: int, prefix: int = 0, x: int | None = None
    ) -> list[OperatorTime]:
        prices = {
            "context_embedding": 1.0,
            "context_attention": 5.0 if not prefix else 0.001 * s * prefix,
            "context_ffn": 0.1 * (x or 0),
            "context_logits_gemm": 1e9,  # must not be used: the decode's output projection is
        }
        return rows(self.PREFILL, prices, indices)

    def evaluate_generation_ops(
        self, indices: list[int], *, batch_size: int, s: int
    ) -> list[OperatorTime]:
        prices = {
            "generation_attention": 0.01 * batch_size * s,
            "generation_ffn": 7.0,
            "generation_logits_gemm": 0.5 * batch_size,
        }
        return rows(self.DECODE, prices, indices)


def rows(
    names: tuple[str, ...], prices: dict[str, float], indices: list[int]
) -> list[OperatorTime]:
    return [(names[i], prices[names[i]], 0.0, "silicon") for i in indices]


TABLES = OperatorTables.of(Formulas(), Formulas.PREFILL, Formulas.DECODE)


def test_layers_are_all_operators_but_attention() -> None:
    assert TABLES.layers_s(((300, 0), (1, 99))) == pytest.approx((1 + 0.1 * 301 + 0.5 * 2) / 1e3)


def test_a_step_adds_the_attention_of_each_chunk_and_of_all_decodes() -> None:
    chunks = ((30, 0), (20, 2000), (1, 99), (1, 299))
    attention_ms = 5.0 + 0.001 * 20 * 2000 + 0.01 * 2 * 200
    layers_ms = 1e3 * TABLES.layers_s(chunks)
    assert 1e3 * TABLES.step_s(chunks) == pytest.approx(layers_ms + attention_ms)


def test_sampling_is_part_of_every_step_and_takes_longer_for_more_requests() -> None:
    sampled = replace(TABLES, sampling=TopPSampling(vocabulary=128_000, bytes_per_s=3.35e12))
    alone_s, many_s = (
        sampled.step_s(chunks) - TABLES.step_s(chunks)
        for chunks in ([(512, 0)], [(512, 0), *[(1, 99)] * 47])
    )
    assert 0.1e-3 < alone_s < 0.2e-3
    # vLLM's developers measured 1.2 ms for 48 requests and a vocabulary of 131,072.
    assert many_s == pytest.approx(1.2e-3, rel=0.1)


def test_the_generation_config_says_whether_requests_are_sampled_with_top_p(tmp_path: Path) -> None:
    assert asks_for_top_p(tmp_path) is None
    for said, asks in (
        ({"top_p": 0.9}, True),
        ({"top_p": 1.0}, False),
        ({"top_p": None}, False),
        ({}, False),
    ):
        (tmp_path / "generation_config.json").write_text(json.dumps(said))
        assert asks_for_top_p(tmp_path) is asks


@pytest.mark.parametrize("text", ['{"top_p": ', "[0.9]", '{"top_p": [0.9]}', '{"top_p": "most"}'])
def test_a_generation_config_that_cannot_be_read_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ValueError, match=r"generation_config\.json .*--sampling greedy"):
        asks_for_top_p(tmp_path)


def test_prior_context_never_makes_a_chunk_faster_than_what_was_measured() -> None:
    assert 1e3 * TABLES.chunk_attention_s(10, 0) == pytest.approx(5.0)
    assert 1e3 * TABLES.chunk_attention_s(10, 100) == pytest.approx(5.0), "the chunk alone"
    assert 1e3 * TABLES.chunk_attention_s(2, 1000) == pytest.approx(10.02), "one decode's read"
    assert 1e3 * TABLES.chunk_attention_s(100, 1000) == pytest.approx(100.0), "the scaled one"


def test_operators_that_depend_on_the_context_are_attention_whatever_their_names() -> None:
    """As in DeepSeek, whose attention is `mla_block`, and in gpt-oss, which has two kinds."""

    class TwoKinds(Formulas):
        PREFILL = ("context_mla_block", "context_ffn", "context_attention")
        DECODE = ("generation_mla_block", "generation_logits_gemm", "generation_attention")
        PRICES = {
            "context_mla_block": 2.0,
            "context_ffn": 0.1,
            "context_attention": 1.0,
            "generation_mla_block": 0.2,
            "generation_attention": 0.1,
        }

        def evaluate_context_ops(
            self,
            indices: list[int],
            *,
            batch_size: int,
            s: int,
            prefix: int = 0,
            x: int | None = None,
        ) -> list[OperatorTime]:
            prices = {
                n: p * (1 if n == "context_ffn" else s + prefix) for n, p in self.PRICES.items()
            }
            return rows(self.PREFILL, prices, indices)

        def evaluate_generation_ops(
            self, indices: list[int], *, batch_size: int, s: int
        ) -> list[OperatorTime]:
            prices = {name: price * s for name, price in self.PRICES.items()}
            return rows(self.DECODE, {**prices, "generation_logits_gemm": 5.0}, indices)

    tables = OperatorTables.of(TwoKinds(), TwoKinds.PREFILL, TwoKinds.DECODE)
    assert (tables.prefill_attention, tables.prefill_rest) == ((0, 2), (1,))
    assert (tables.decode_attention, tables.decode_rest, tables.logits) == ((0, 2), (), 1)
    assert 1e3 * tables.decode_attention_s(1, 100) == pytest.approx(30.0)
    assert 1e3 * tables.chunk_attention_s(10, 0) == pytest.approx(30.0)


def test_steps_of_few_tokens_run_the_operators_of_the_decode_phase() -> None:
    """An engine may overlap operators in them, as vLLM does with DeepSeek's shared expert."""
    assert 1e3 * TABLES.layers_s(((1, 99),) * 4) == pytest.approx(7.0 + 0.5 * 4)
    assert 1e3 * TABLES.layers_s(((255, 0), (1, 99))) == pytest.approx(7.0 + 0.5 * 2)
    assert 1e3 * TABLES.layers_s(((256, 0), (1, 99))) == pytest.approx(1 + 25.7 + 0.5 * 2)


def test_projections_that_were_measured_with_attention_are_computed_once_a_step() -> None:
    """Not once for each chunk and once for the decodes, as the measurements would have it."""
    tables = replace(TABLES, has_projections=True)
    alone_ms = 1e3 * TABLES.chunk_attention_s(20, 0)
    assert tables.chunk_attention_s(20, 0) == 0.0
    assert tables.layers_s(((20, 0),)) == pytest.approx(
        TABLES.layers_s(((20, 0),)) + alone_ms / 1e3
    )
    both = ((300, 0), (300, 0))
    assert 1e3 * tables.step_s(both) == pytest.approx(1e3 * TABLES.step_s(both) - alone_ms)


@needs_tables
def test_deepseeks_projections_are_counted_once() -> None:
    """A decode beside a chunk costs a fraction of the projections' launches, as in one kernel."""
    tables = compile_model(Deployment("h200_sxm", "deepseek-ai/DeepSeek-V3", "vllm", 8, 8)).tables()
    chunk, decode = (600, 0), (1, 1000)
    alone_s = tables.step_s((chunk,))
    assert alone_s < tables.step_s((chunk, decode)) < alone_s + 0.2 * tables.step_s((decode,))


def test_a_model_without_attention_or_output_projection_is_refused() -> None:
    formulas = Formulas()
    with pytest.raises(MissingTablesError, match="a model with attention"):
        OperatorTables.of(formulas, ("context_embedding",), Formulas.DECODE)
    with pytest.raises(MissingTablesError, match="one output projection, not 0"):
        OperatorTables.of(formulas, Formulas.PREFILL, Formulas.DECODE[:2])


def test_the_layers_are_asked_for_on_both_sides_of_every_tile_edge() -> None:
    batches = layer_batches(StressLimits(max_num_batched_tokens=2048, max_num_seqs=100))
    prefills = [batch[0][0] for batch in batches if len(batch) == 1]
    decodes = [len(batch) for batch in batches if len(batch) > 1]
    assert prefills == sorted(set(prefills))
    assert {1, 2, 16, 17, 256, 257, 512, 513, 1024, 1025, 2048} < set(prefills)
    assert max(prefills) == 2048
    assert decodes == [size for size in prefills if 1 < size <= 100]
    assert all(batch in (((batch[0][0], 0),), ((1, 0),) * len(batch)) for batch in batches)


def test_the_missing_package_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aiconfigurator_core", None)
    for name in ("perf_database", "common"):
        monkeypatch.setitem(sys.modules, f"aiconfigurator_core.sdk.{name}", None)
    with pytest.raises(MissingTablesError, match=r"pip install 'slosched\[aiconfigurator\]'"):
        compose_profile(Deployment("h200_sxm", "meta-llama/Meta-Llama-3.1-8B"))


def test_a_backend_without_tables_is_named() -> None:
    with pytest.raises(ValueError, match="no backend 'tgi'; it has vllm, sglang, trtllm"):
        Deployment("h200_sxm", "Qwen/Qwen3-8B", "tgi")


@pytest.mark.parametrize("path", CSVS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_committed_csv_holds_what_a_fit_needs(path: Path) -> None:
    profile = read_profile(path)
    steps = [m for m in profile.measurements if m.part is Part.STEP]
    layers = [m for m in profile.measurements if m.part is Part.LAYERS]
    assert len(steps) == 160
    assert {m.regime for m in steps} == {"decode", "prefill", "mixed"}
    assert len(layers) > 200
    assert "additive by construction" in profile.provenance["not_in_it"]
    assert "estimate" in profile.provenance["kv_capacity_origin"]
    capacity = int(profile.provenance["kv_capacity_tokens"])
    assert max(kv_tokens(m) for m in steps) <= capacity
    assert path.stat().st_size < 40_000


def kv_tokens(measurement: Measurement) -> int:
    return sum(new + prior for new, prior in measurement.chunks)


def test_all_gpus_that_were_asked_for_are_committed() -> None:
    assert {f"{path.parent.name}/{path.stem}" for path in CSVS} == {
        source.name for source in script().SOURCES
    }


@needs_tables
@pytest.mark.parametrize("name", ["h200/llama-3.1-8b", "a100/llama-3.1-70b-tp4"])
def test_composing_again_gives_the_committed_csv(name: str) -> None:
    source = next(s for s in script().SOURCES if s.name == name)
    composed = script().fitted_steps(source)
    committed = read_profile(FOLDER / f"{name}.csv")
    assert composed.provenance == committed.provenance
    assert [m.chunks for m in composed.measurements] == [m.chunks for m in committed.measurements]
    assert [m.seconds for m in composed.measurements] == pytest.approx(
        [m.seconds for m in committed.measurements],
        abs=1e-9,  # the file holds nanoseconds
    )


@needs_tables
@pytest.mark.parametrize(
    ("deployment", "reason"),
    [
        (Deployment("h900", "Qwen/Qwen3-8B"), "no queryable versions"),
        (Deployment("h200_sxm", "Qwen/Qwen3-8B", tensor_parallel=3), "divisible"),
        (Deployment("a100_sxm", "openai/gpt-oss-20b", "trtllm"), "attention data missing"),
    ],
)
def test_what_the_tables_do_not_hold_is_said(deployment: Deployment, reason: str) -> None:
    with pytest.raises(MissingTablesError, match=reason) as caught:
        compose_profile(deployment)
    assert deployment.system in str(caught.value)


@needs_tables
def test_a_model_that_does_not_fit_needs_more_gpus() -> None:
    with pytest.raises(NoRoomError, match=r"does not fit on l40s.* no KV budget.*--tp"):
        compose_profile(Deployment("l40s", "meta-llama/Meta-Llama-3.1-70B"))


@needs_tables
@pytest.mark.parametrize("backend", ["vllm", "trtllm"])
def test_the_memory_that_is_left_does_not_depend_on_how_an_engine_counts_its_share(
    backend: str,
) -> None:
    """Of the memory, vLLM takes 0.9 in all, and TensorRT-LLM 0.9 of what the model leaves."""
    composed = compose_profile(Deployment("h100_sxm", "Qwen/Qwen3-32B", backend), num_steps=40)
    memory = kv_memory(fit(composed, "linear").model)
    assert memory is not None
    tokens = memory.tokens_in_share(0.9) if backend == "vllm" else memory.tokens_in_rest(0.9)
    assert tokens == pytest.approx(int(composed.provenance["kv_capacity_tokens"]), rel=0.05)
    assert memory.other_bytes > memory.weight_bytes


@needs_tables
def test_expert_parallelism_is_for_experts() -> None:
    with pytest.raises(ValueError, match=r"no experts to spread.*leave out --ep"):
        compose_profile(Deployment("h100_sxm", "Qwen/Qwen3-8B", "vllm", 2, 2))


MIXTRAL = {
    "architectures": ["MixtralForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mixtral",
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "torch_dtype": "bfloat16",
    "vocab_size": 32000,
}
"""The sizes of Mixtral-8x7B-v0.1, as in its config.json on the Hugging Face hub."""


@pytest.fixture
def mixtral(tmp_path: Path) -> str:
    folder = tmp_path / "my-mixtral"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(MIXTRAL))
    return str(folder)


@needs_tables
def test_a_folder_with_a_config_is_enough_and_experts_are_shared_or_spread(mixtral: str) -> None:
    """Both ways of the experts take at least as long as reading those that 8 decodes need."""
    composed = [
        compose_profile(Deployment("h100_sxm", mixtral, "vllm", 2, ep), num_steps=20)
        for ep in (1, 2)
    ]
    assert [c.provenance["model"] for c in composed] == ["my-mixtral", "my-mixtral"]
    assert composed[0].provenance["engine"] == "vLLM 0.24.0, bfloat16, tensor parallel 2"
    assert composed[1].provenance["engine"].endswith("tensor parallel 2, expert parallel 2")
    # Keys and values of 4 of the 8 KV heads, of 128 numbers of 2 bytes, in 32 layers.
    assert composed[0].provenance["kv_bytes_per_token_per_gpu"] == str(2 * 4 * 128 * 2 * 32)
    sampled = compose_profile(
        Deployment("h100_sxm", mixtral, "vllm", 2, samples_top_p=True), num_steps=20
    )
    assert sampled.provenance["sampling"].startswith("top-p")
    one_s, sampled_s = (
        next(m.seconds for m in profile.measurements if m.chunks == ((1, 0),) * 64)
        for profile in (composed[0], sampled)
    )
    # Each GPU sorts all of the 32,000 logits of each request.
    assert sampled_s - one_s == pytest.approx(0.1e-3 + 64 * 32_000 * 590 / 3.35e12)
    for profile in composed:
        one, many = (
            next(m.seconds for m in profile.measurements if m.chunks == ((1, 0),) * count)
            for count in (1, 8)
        )
        gpu_bytes_per_s, expert_bytes = 3.35e12, 3 * 4096 * 14336 * 2 * 32 / 2
        assert one > 2 * expert_bytes / gpu_bytes_per_s
        assert many > 2 * one, "more decodes need more experts"


@needs_tables
def test_what_weights_and_cache_are_stored_as_is_said() -> None:
    said = compose_profile(Deployment("h200_sxm", "openai/gpt-oss-20b"), num_steps=16).provenance
    assert "bfloat16 weights, bfloat16 KV cache, w4a16_mxfp4 experts" in said["engine"]
    assert int(said["kv_bytes_per_token_per_gpu"]) == 2 * 8 * 64 * 2 * 24


@needs_tables
def test_a_profile_covers_the_steps_that_were_asked_for() -> None:
    deployment = Deployment("h200_sxm", "Qwen/Qwen3-8B")
    profile = compose_profile(deployment, max_num_batched_tokens=16_384, num_steps=40)
    assert "sampling" not in profile.provenance, "not asked for"
    assert max(m.shape.num_tokens for m in profile.measurements) == 16_384
    assert profile.provenance["largest_step_tokens"] == "16384"
    assert profile.provenance["range"].startswith("up to 16384 tokens and 512 requests")


@needs_tables
@pytest.mark.parametrize("files", [(), ("config.yaml",)])
def test_a_folder_without_a_config_is_named(tmp_path: Path, files: tuple[str, ...]) -> None:
    for name in files:
        (tmp_path / name).touch()
    with pytest.raises(ConfigMissingError, match=r"has no config\.json") as caught:
        compose_profile(Deployment("h100_sxm", str(tmp_path)))
    assert str(tmp_path) in str(caught.value)


@needs_tables
def test_a_config_that_cannot_be_downloaded_is_not_taken_for_missing_tables(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hub = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(hub, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(hub, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ConfigMissingError, match=r"cannot download the config\.json") as caught:
        compose_profile(Deployment("h100_sxm", "nobody/has-this-model"))
    assert "nobody/has-this-model" in str(caught.value)
    assert "give the folder as --model" in str(caught.value)


@pytest.mark.parametrize(
    ("gpu", "system"),
    [("h100", "h100_sxm"), ("H100-SXM", "h100_sxm"), ("l40s", "l40s"), ("gb200", "gb200")],
)
def test_gpus_have_short_names(gpu: str, system: str) -> None:
    assert system_of(gpu) == system


def test_a_gpu_that_is_not_known_is_said_with_those_that_are() -> None:
    with pytest.raises(ValueError, match=r"no GPU 'h10'.*h100.*l40s"):
        system_of("h10")


@pytest.mark.parametrize(("tp", "ep"), [(4, 3), (2, 4), (0, 1)])
def test_experts_are_spread_over_the_gpus_of_the_other_layers(tp: int, ep: int) -> None:
    with pytest.raises(ValueError, match="--ep"):
        Deployment("h100_sxm", "openai/gpt-oss-120b", "vllm", tp, ep)


def script() -> ModuleType:
    """Import profiling/aiconfigurator/compose.py, a script that is in no package."""
    spec = importlib.util.spec_from_file_location("compose_aic", FOLDER / "compose.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["compose_aic"] = module
    spec.loader.exec_module(module)
    return module
