"""LoRA adapters in the torch engine: each request's tokens are those of its own merged model."""

from __future__ import annotations

import gc
import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import ALPHA, LAYERS, RANK, merged, write_adapter
from greedy import continued
from safetensors.torch import load_file, save_file

from slosched.core import AdapterError, Limits, Request, SamplingParams
from slosched.engine.background import InBackground
from slosched.engine.loop import Engine, MonotonicClock
from slosched.engine.overlap import OverlappedEngine
from slosched.engine.torch import LoadedModel, TorchExecutor, load_model
from slosched.engine.torch.lora import LoraAdapter
from slosched.kv import HashIndex, KVCache
from slosched.policy import FCFS
from slosched.scheduler import Scheduler

NUM_TOKENS = 10


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load_model("tiny-random", dtype="float32", device="cpu", num_threads=1)


@pytest.fixture(scope="module")
def paths(model: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {
        name: write_adapter(folder / name, model.model, seed)
        for seed, name in enumerate(("one", "two"))
    }


@pytest.fixture(scope="module")
def twins(model: LoadedModel, paths: dict[str, Path]) -> dict[str | None, Any]:
    """Return the models into which the adapters are merged; None has that without one."""
    base = merged(model.model, paths["one"], scaling=0.0)
    return {None: base, **{name: merged(model.model, path) for name, path in paths.items()}}


@pytest.mark.parametrize("max_loras", [None, 1])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_batch_of_several_adapters_is_what_each_merged_model_says(
    model: LoadedModel,
    paths: dict[str, Path],
    twins: dict[str | None, Any],
    overlap: bool,
    max_loras: int | None,
) -> None:
    """With chunks, a prefix cache, too few blocks for all, and the same prompts for all adapters."""
    adapters = {name: model.load_adapter(path) for name, path in paths.items()}
    executor = TorchExecutor(model, num_blocks=24, block_size=4)
    kv = KVCache(24, 4, 0, HashIndex())
    limits = Limits(max_num_batched_tokens=12, max_loras=max_loras)
    scheduler = Scheduler(FCFS(), kv, limits)
    engine = Engine(scheduler, executor, MonotonicClock())
    if overlap:
        engine = OverlappedEngine(scheduler, InBackground(executor), MonotonicClock())
    prompts = [list(range(30, 47)), list(range(90, 99))]
    names: list[str | None] = ["one", None, "two", "one", "two", None]
    requests = []
    for i, name in enumerate(names):
        for j, prompt in enumerate(prompts):
            request = Request(
                f"{i}-{j}", 0.0, len(prompt), NUM_TOKENS, prompt_token_ids=prompt,
                sampling=SamplingParams(ignore_eos=True),
                lora_id=name, adapter=None if name is None else adapters[name],
            )  # fmt: skip
            requests.append(request)
            scheduler.queue(request)
    mixed = 0
    while engine.has_work:
        loras = {chunk.request.lora_id for chunk in engine.step().batch.chunks}
        assert max_loras is None or len(loras - {None}) <= max_loras
        mixed += len(loras) > 1
    assert mixed
    assert any(request.num_cached_tokens for request in requests)
    for request in requests:
        expected = continued(
            twins[request.lora_id], list(request.prompt_token_ids or ()), NUM_TOKENS
        )
        assert request.output_token_ids == expected, request.request_id
    assert len({tuple(r.output_token_ids) for r in requests}) == 6, "three models, two prompts"
    kv.check()


def test_scalings_are_pefts(model: LoadedModel, tmp_path: Path) -> None:
    def ratio(number: int, layer: str = "model.layers.0.mlp.down_proj", **settings: Any) -> float:
        path = write_adapter(tmp_path / str(number), model.model, 0, **settings)
        up = load_file(path / "adapter_model.safetensors")[
            f"base_model.model.{layer}.lora_B.weight"
        ]
        scaled = model.load_adapter(path).factors[layer].up.T
        return float((scaled / up).mean())

    assert ratio(1) == pytest.approx(ALPHA / RANK)
    assert ratio(2, use_rslora=True) == pytest.approx(ALPHA / 2)
    pattern = {"layers.0.mlp.down_proj": 40, r"layers.\d+.self_attn.q_proj": 8}
    assert ratio(3, alpha_pattern=pattern) == pytest.approx(10)
    assert ratio(4, "model.layers.1.mlp.down_proj", alpha_pattern=pattern) == pytest.approx(1.5)
    assert ratio(5, "model.layers.1.self_attn.q_proj", alpha_pattern=pattern) == pytest.approx(2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"use_dora": True}, "use_dora=True"),
        ({"bias": "all"}, "bias='all'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"peft_type": "IA3"}, "peft_type='IA3'"),
        ({"layer_replication": [[0, 1], [0, 1]]}, "layer_replication"),
        ({"init_lora_weights": "pissa_niter_16"}, "trained on other weights than the model's"),
        ({"init_lora_weights": "olora"}, "path_initial_model_for_weight_conversion"),
        ({"init_lora_weights": "lora_ga"}, "trained on other weights than the model's"),
        ({"lora_alpha": "much"}, "lora_alpha='much'"),
        ({"lora_alpha": None}, "lora_alpha=None"),
        ({"alpha_pattern": {"(": 8}}, r"alpha_pattern=\{'\(': 8\}"),
        ({"alpha_pattern": ["q_proj"]}, r"alpha_pattern=\['q_proj'\]"),
        ({"lora_alpha": 1e300}, "not all numbers"),
    ],
)
def test_settings_that_are_not_implemented_or_make_no_sense_are_refused(
    model: LoadedModel, tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    path = write_adapter(tmp_path / "adapter", model.model, 0, **settings)
    with pytest.raises(AdapterError, match=message):
        model.load_adapter(path)


def test_files_that_do_not_fit_are_refused_with_the_reason(
    model: LoadedModel, tmp_path: Path
) -> None:
    path = write_adapter(tmp_path / "adapter", model.model, 0)
    weights_path = path / "adapter_model.safetensors"
    weights = load_file(weights_path)
    key = f"base_model.model.model.layers.0.{LAYERS[0]}"

    def refused(**changed: torch.Tensor) -> str:
        names = {"a": f"{key}.lora_A.weight", "b": f"{key}.lora_B.weight",
                 "head": "base_model.model.lm_head.lora_A.weight",
                 "other": "base_model.model.model.norm.weight"}  # fmt: skip
        save_file({**weights, **{names[n]: w for n, w in changed.items()}}, weights_path)
        with pytest.raises(AdapterError) as caught:
            model.load_adapter(path)
        return str(caught.value)

    assert "[rank, 64] and [64, rank]" in refused(a=torch.zeros(4, 65))
    assert "[rank, 64] and [64, rank]" in refused(b=torch.zeros(64, 3))
    assert "[rank, 64] and [64, rank]" in refused(a=torch.zeros(0, 64), b=torch.zeros(64, 0))
    assert "[rank, 64] and [64, rank]" in refused(a=torch.tensor(0.0))
    assert "not all numbers" in refused(b=torch.full((64, 4), torch.nan))
    assert "lm_head, which is no" in refused(head=torch.zeros(4, 64))
    assert "no LoRA weight" in refused(other=torch.zeros(64))
    save_file({f"{key}.lora_A.weight": torch.zeros(4, 64)}, weights_path)
    with pytest.raises(AdapterError, match="only lora_A"):
        model.load_adapter(path)
    weights_path.write_bytes(b"no safetensors")
    with pytest.raises(AdapterError, match="cannot be read"):
        model.load_adapter(path)
    (path / "adapter_config.json").write_text("[]")
    with pytest.raises(AdapterError, match="not a JSON object"):
        model.load_adapter(path)
    with pytest.raises(AdapterError, match=r"adapter_config\.json cannot be read"):
        model.load_adapter(tmp_path / "nowhere")


def test_weights_live_as_long_as_something_refers_to_them(
    model: LoadedModel, paths: dict[str, Path]
) -> None:
    class Counted(LoraAdapter):
        """An adapter to which weak references are possible."""

        __slots__ = ("__weakref__",)

    executor = TorchExecutor(model, num_blocks=8, block_size=4)
    scheduler = Scheduler(FCFS(), KVCache(8, 4))
    engine = Engine(scheduler, executor, MonotonicClock())
    adapter = Counted(model.load_adapter(paths["one"]).factors)
    assert adapter.num_bytes > 0
    there = weakref.ref(adapter)
    scheduler.queue(Request("a", 0.0, 3, 3, prompt_token_ids=[1, 2, 3], lora_id="x", adapter=adapter,
                            sampling=SamplingParams(ignore_eos=True)))  # fmt: skip
    del adapter
    engine.step()
    gc.collect()
    assert there() is not None
    while engine.has_work:
        engine.step()
    gc.collect()
    assert there() is None


def test_a_request_whose_adapter_is_not_loaded_is_not_computed_without_it(
    model: LoadedModel,
) -> None:
    executor = TorchExecutor(model, num_blocks=8, block_size=4)
    scheduler = Scheduler(FCFS(), KVCache(8, 4))
    scheduler.queue(Request("a", 0.0, 3, 3, prompt_token_ids=[1, 2, 3], lora_id="x"))
    with pytest.raises(ValueError, match="asks for LoRA 'x'"):
        Engine(scheduler, executor, MonotonicClock()).step()


def test_a_step_that_fails_as_it_applies_an_adapter_leaves_the_model_as_it_was(
    model: LoadedModel, paths: dict[str, Path]
) -> None:
    adapter = model.load_adapter(next(iter(paths.values())))
    factors = {**adapter.factors, "no layer": next(iter(adapter.factors.values()))}

    def first_token(**lora: Any) -> int:
        executor = TorchExecutor(model, num_blocks=8, block_size=4)
        scheduler = Scheduler(FCFS(), KVCache(8, 4))
        request = Request("a", 0.0, 3, 1, prompt_token_ids=[1, 2, 3], **lora)
        scheduler.queue(request)
        Engine(scheduler, executor, MonotonicClock()).step()
        return request.output_token_ids[0]

    before = first_token()
    with pytest.raises(KeyError, match="no layer"):
        first_token(lora_id="x", adapter=LoraAdapter(factors))
    assert not any(layer._forward_hooks for layer in model.adapter_targets.values())
    assert first_token() == before


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft calls what transformers will drop
def test_peft_computes_the_same(model: LoadedModel, paths: dict[str, Path]) -> None:
    """peft's own reading of the files gives the logits of the merged model, from which we start."""
    peft = pytest.importorskip("peft")
    ids = torch.tensor([[30, 31, 32, 90]])
    for path in paths.values():
        base = merged(model.model, path, scaling=0.0)
        with torch.inference_mode():
            theirs = peft.PeftModel.from_pretrained(base, path)(ids).logits
            ours = merged(model.model, path)(ids).logits
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert json.loads((path / "adapter_config.json").read_text())["r"] == RANK
