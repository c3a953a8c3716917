"""load_model: loads a transformers model by name to run over the paged KV cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub import snapshot_download
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from slosched.engine.model_path import ModelUnavailableError, check_no_pointers, local_directory
from slosched.engine.torch.attention import (
    AUTO,
    AttentionBackend,
    check_name,
    choose_backend,
)
from slosched.engine.torch.checkpoint import UNREADABLE, read_checkpoint
from slosched.engine.torch.cpu_dtype import fastest_cpu_dtype
from slosched.engine.torch.embedded import SMOLLM2, embedded_model_dir
from slosched.engine.torch.forward import ATTENTION_NAME, refusing_other_attention
from slosched.engine.torch.guards import Probed, check_against_eager, probe
from slosched.engine.torch.kv_cache import KVGeometry
from slosched.engine.torch.lora import LoraAdapter, Targets, load_adapter, targets_of
from slosched.engine.torch.packed_linear import pack_linears
from slosched.engine.torch.tiny import TINY_RANDOM, tiny_config, tiny_tokenizer

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_CONFIG_FILES = ("*.json", "*.txt", "*.jinja", "tokenizer.model")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that has passed the guards, with what a server must know about it."""

    name: str
    model: Any
    """The transformers model, in eval mode, with slosched's attention."""
    tokenizer: Any | None
    """The transformers tokenizer; None if the model comes without one."""
    dtype: torch.dtype
    device: torch.device
    max_model_len: int
    """The longest context in tokens for which the model was made."""
    vocab_size: int
    eos_token_ids: frozenset[int]
    geometry: KVGeometry
    window_tokens: int | None
    """The last tokens that a token sees, itself included, if every layer has a sliding window."""
    backend: AttentionBackend
    adapter_targets: Targets
    """The layers that LoRA adapters may change."""

    def load_adapter(self, path: Path) -> LoraAdapter:
        """Return the LoRA adapter in a directory in peft's format.

        Raises AdapterError if there is none or it does not fit the model.
        """
        return load_adapter(path, self.adapter_targets)


def load_model(
    name: str,
    *,
    dtype: str = "auto",
    device: str = "auto",
    load_format: Literal["auto", "dummy"] = "auto",
    attention: str = AUTO,
    block_size: int = 16,
    cache_dir: Path | None = None,
    seed: int = 0,
    num_threads: int | None = None,
) -> LoadedModel:
    """Load `name`: `smollm2-135m`, `tiny-random`, a local model directory, or a hub id.

    `load_format="dummy"` reads only the config and draws the weights from `seed`; timings are
    right, text is not.  `dtype="auto"` is bfloat16 on a GPU and whichever type is faster on a CPU.
    `attention` names a backend, or is "auto" for the best that takes KV blocks of `block_size`.
    `cache_dir` is where the embedded model is kept; `num_threads` sets torch's number for the whole
    process.

    Raises ModelUnavailableError if there is no such model, UnsupportedModelError if it needs
    attention that is not implemented, BackendUnavailableError if the named backend cannot run here,
    ValueError for a wrong option.
    """
    if load_format not in ("auto", "dummy"):
        raise ValueError(f"load_format must be 'auto' or 'dummy', not {load_format!r}")
    check_name(attention)  # before the model is loaded, which takes a while
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    torch_device = chosen_device(device)
    torch_dtype = _dtype(dtype, torch_device)
    if name == TINY_RANDOM:
        model = _random_model(tiny_config(), torch_dtype, torch_device, seed)
        tokenizer = tiny_tokenizer()
    else:
        directory = _model_dir(name, load_format == "dummy", cache_dir)
        model = _model(directory, torch_dtype, torch_device, load_format == "dummy", seed)
        tokenizer = _tokenizer(directory)
    model.eval()
    probed = probe(model)
    pack_linears(model)  # now, since some quantized weights are unpacked as a model runs first
    backend = choose_backend(attention, torch_device, probed.geometry, block_size)
    return _proven(name, model, tokenizer, probed, backend)


def _proven(
    name: str,
    model: Any,
    tokenizer: Any | None,
    probed: Probed,
    backend: AttentionBackend,
) -> LoadedModel:
    config = model.config.get_text_config()
    max_model_len = _max_model_len(config)
    check_against_eager(model, probed, backend, max_model_len)
    return LoadedModel(
        name=name,
        model=model,
        tokenizer=tokenizer,
        dtype=model.dtype,
        device=model.device,
        max_model_len=max_model_len,
        vocab_size=int(config.vocab_size),
        eos_token_ids=_eos_token_ids(model, tokenizer, int(config.vocab_size)),
        geometry=probed.geometry,
        window_tokens=probed.window_tokens,
        backend=backend,
        adapter_targets=targets_of(model),
    )


def _max_model_len(config: Any) -> int:
    """Return the longest context for which a model was made, and which does not touch others.

    With LongRoPE (Phi-3, Phi-4) one token behind the original length turns the keys of all tokens
    of its step by other angles, so that the answers beside it would change.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    originals = [
        int(part["original_max_position_embeddings"])
        for part in (rope, *rope.values())
        if isinstance(part, Mapping) and part.get("rope_type") == "longrope"
    ]
    return min([int(config.max_position_embeddings), *originals])


def chosen_device(device: str) -> torch.device:
    """Return the device that `--device` names; "auto" is a GPU where there is one."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        wanted = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device must be 'auto', 'cpu' or 'cuda', not {device!r}") from error
    if wanted.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {device!r} was asked for, but torch sees no GPU: use 'cpu'")
    return wanted


def _dtype(dtype: str, device: torch.device) -> torch.dtype:
    if dtype == "auto":
        return torch.bfloat16 if device.type != "cpu" else fastest_cpu_dtype()
    if dtype not in _DTYPES:
        raise ValueError(f"dtype must be 'auto' or one of {sorted(_DTYPES)}, not {dtype!r}")
    return _DTYPES[dtype]


def _model_dir(name: str, config_only: bool, cache_dir: Path | None) -> Path:
    """Return the directory of the model's files; fetch them if they are missing."""
    if name == SMOLLM2:
        return embedded_model_dir(cache_dir)
    if (path := local_directory(name)) is not None:
        if not (path / "config.json").is_file():
            raise ModelUnavailableError(f"directory {name!r} holds no config.json")
        check_no_pointers(path)
        return path
    files = _CONFIG_FILES if config_only else (*_CONFIG_FILES, "*.safetensors")
    try:
        return Path(snapshot_download(name, allow_patterns=list(files)))
    except (OSError, ValueError) as error:
        raise ModelUnavailableError(
            f"unknown model {name!r}: it is neither {SMOLLM2!r} nor {TINY_RANDOM!r}, there is no "
            f"such directory here, and it could not be fetched from the Hugging Face hub ({error})"
        ) from error


def _model(
    directory: Path, dtype: torch.dtype, device: torch.device, dummy: bool, seed: int
) -> Any:
    if dummy:
        return _random_model(_config(directory), dtype, device, seed)
    if not any(directory.glob("*.safetensors")):
        raise ModelUnavailableError(
            f"{directory} holds no *.safetensors; for random weights use load_format='dummy'"
        )
    return read_checkpoint(directory, dtype).to(device)


def _config(directory: Path) -> Any:
    try:
        return AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except UNREADABLE as error:
        raise ModelUnavailableError(f"the config in {directory} cannot be read: {error}") from error


def _random_model(config: Any, dtype: torch.dtype, device: torch.device, seed: int) -> Any:
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.device(device), refusing_other_attention():
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=ATTENTION_NAME
        )


def _tokenizer(directory: Path) -> Any | None:
    if not any((directory / file).is_file() for file in _TOKENIZER_FILES):
        return None
    try:
        return AutoTokenizer.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # the library in Rust raises nothing more special
        raise ModelUnavailableError(
            f"the tokenizer in {directory} cannot be read: {error}"
        ) from error


def _eos_token_ids(model: Any, tokenizer: Any | None, vocab_size: int) -> frozenset[int]:
    """Return the tokens at which `generate` stops.

    The tokenizer is asked last, since conversions often leave a wrong token there.  An id outside
    the vocabulary, such as -1, is none: it can be neither drawn nor ruled out.  Raises
    ModelUnavailableError for one that is no number.
    """
    sources = (model.generation_config, model.config.get_text_config(), tokenizer)
    for source in sources:
        named = getattr(source, "eos_token_id", None)
        ids = named if isinstance(named, list) else [] if named is None else [named]
        if not all(isinstance(i, int) for i in ids):
            raise ModelUnavailableError(
                f"eos_token_id is {named!r} in generation_config.json or config.json; write the "
                "number of a token, or a list of numbers"
            )
        if found := frozenset(i for i in ids if 0 <= i < vocab_size):
            return found
    return frozenset()
