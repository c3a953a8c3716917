"""`tiny-random`: a llama of 0.1 M random parameters that reads bytes, ready in milliseconds."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

TINY_RANDOM = "tiny-random"
_SPECIAL_TOKENS = ("<|pad|>", "<|im_start|>", "<|im_end|>")
_CHAT_TEMPLATE = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}To call one: <tool_call>
{"name": <name>, "arguments": <object>}
</tool_call><|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message['role'] }}
{{ message['content'] }}
{%- for call in message['tool_calls'] or [] %}
{%- set called = call['function'] %}
<tool_call>
{"name": "{{ called['name'] }}", "arguments": {{ called['arguments'] | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""Functions are shown and called in Hermes's form."""


def tiny_config() -> Any:
    """Return a config with weights so large that the greedy token depends on all of the context."""
    return LlamaConfig(
        vocab_size=256 + len(_SPECIAL_TOKENS),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        initializer_range=0.3,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )


def tiny_tokenizer() -> Any:
    """Return a tokenizer with one token per byte, after the special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate((*_SPECIAL_TOKENS, *alphabet))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in _SPECIAL_TOKENS])
    pad, bos, eos = _SPECIAL_TOKENS
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=pad,
        bos_token=bos,
        eos_token=eos,
        chat_template=_CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
