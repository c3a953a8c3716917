"""Conversion of a llama model in one GGUF file to an ordinary transformers directory.

transformers can read GGUF, too, but takes a minute of CPU time for it, needs another package, names
the wrong end-of-sequence token for SmolLM2 and forgets that its tokenizer splits digits.  The
format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, PreTrainedTokenizerFast

_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OTHER_TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_CONTROL_TOKEN = 3
"""The `tokenizer.ggml.token_type` of tokens such as <|im_end|>."""


def convert_llama_gguf(gguf_path: Path, directory: Path) -> None:
    """Write config, bfloat16 weights and tokenizer of the model in `gguf_path` to `directory`.

    Raises ValueError if it is not a llama model with the SmolLM tokenizer.
    """
    reader = GGUFReader(gguf_path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    found = (fields["general.architecture"], fields["tokenizer.ggml.pre"])
    if found != ("llama", "smollm"):
        raise ValueError(f"{gguf_path} holds {found}, only ('llama', 'smollm') can be converted")
    config = _config(fields, tied="output.weight" not in {t.name for t in reader.tensors})
    config.save_pretrained(directory)
    _generation_config(fields).save_pretrained(directory)
    _tokenizer(fields).save_pretrained(directory)
    weights = dict(_weight(tensor, config) for tensor in reader.tensors)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def _config(fields: dict[str, Any], *, tied: bool) -> Any:
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
        vocab_size=fields["llama.vocab_size"],
        hidden_size=fields["llama.embedding_length"],
        intermediate_size=fields["llama.feed_forward_length"],
        num_hidden_layers=fields["llama.block_count"],
        num_attention_heads=fields["llama.attention.head_count"],
        num_key_value_heads=fields["llama.attention.head_count_kv"],
        max_position_embeddings=fields["llama.context_length"],
        rms_norm_eps=fields["llama.attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": fields["llama.rope.freq_base"]},
        tie_word_embeddings=tied,
        **_special_token_ids(fields),
    )


def _generation_config(fields: dict[str, Any]) -> Any:
    return GenerationConfig(**_special_token_ids(fields))


def _special_token_ids(fields: dict[str, Any]) -> dict[str, int]:
    return {
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }


def _tokenizer(fields: dict[str, Any]) -> Any:
    """Return a byte-level BPE tokenizer that splits numbers into digits, as SmolLM's own does."""
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = fields["tokenizer.ggml.token_type"]
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, token_type in zip(tokens, types, strict=True)
            if token_type == _CONTROL_TOKEN
        ]
    )
    ids = _special_token_ids(fields)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=tokens[ids["bos_token_id"]],
        eos_token=tokens[ids["eos_token_id"]],
        pad_token=tokens[ids["pad_token_id"]],
        unk_token=tokens[fields["tokenizer.ggml.unknown_token_id"]],
        chat_template=fields["tokenizer.chat_template"],
        model_max_length=fields["llama.context_length"],
        clean_up_tokenization_spaces=False,
    )


def _weight(tensor: Any, config: Any) -> tuple[str, torch.Tensor]:
    """Return the name and value of one weight as transformers stores them."""
    values = dequantize(tensor.data, tensor.tensor_type)
    name = tensor.name.removesuffix(".weight")
    if not name.startswith("blk."):
        return f"{_OTHER_TENSORS[name]}.weight", _to_bfloat16(values)
    _, layer, part = name.split(".")
    if part == "attn_q":
        values = _rotary_halves(values, config.num_attention_heads)
    elif part == "attn_k":
        values = _rotary_halves(values, config.num_key_value_heads)
    return f"model.layers.{layer}.{_LAYER_TENSORS[part]}.weight", _to_bfloat16(values)


def _rotary_halves(values: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    """Return weights with rotary pairs as transformers stores them.

    The pairs are neighbours in GGUF (2i, 2i + 1) and half a head apart in transformers.
    """
    rows, columns = values.shape
    pairs = values.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def _to_bfloat16(values: npt.NDArray[np.float32]) -> torch.Tensor:
    return torch.from_numpy(values.copy()).to(torch.bfloat16)
