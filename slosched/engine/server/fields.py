"""The fields that a body may have: those that are obeyed, and those that change nothing.

All others are refused, so that no client takes an answer for something that it is not.  The names
are OpenAI's and vLLM's (their API references, and `CompletionRequest` and `ChatCompletionRequest`
of vLLM 0.11 and later).
"""

from __future__ import annotations

from collections.abc import Mapping

from slosched.engine.server.errors import ApiError
from slosched.engine.server.values import Body, shown
from slosched.spelling import meant
from slosched.workload.http_slo import BEST_EFFORT_FIELD, ON_INFEASIBLE_FIELD, PROMISES, TIER_FIELD

STRUCTURED_FIELDS = frozenset(
    [
        "response_format",
        "structured_outputs",
        "guided_json",
        "guided_regex",
        "guided_choice",
        "guided_grammar",
        "guided_whitespace_pattern",
    ]
)
"""Fields that say which grammar the answer follows."""
_GENERATION = frozenset(
    [
        "model",
        "max_tokens",
        "max_completion_tokens",
        "stream",
        "stream_options",
        "priority",
        "cache_salt",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "stop",
        "stop_token_ids",
        "include_stop_str_in_output",
        "min_tokens",
        "ignore_eos",
        "allowed_token_ids",
        "bad_words",
        "logit_bias",
        "logprobs",
        "prompt_logprobs",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "skip_special_tokens",
        "return_token_ids",
        "add_special_tokens",
        "truncate_prompt_tokens",
        *STRUCTURED_FIELDS,
        "n",
        "best_of",
        "use_beam_search",
        "length_penalty",
        ON_INFEASIBLE_FIELD,
        TIER_FIELD,
    ]
)
COMPLETION_FIELDS = _GENERATION | {"prompt", "echo"}
_TEMPLATE = frozenset({"add_generation_prompt", "continue_final_message", "chat_template_kwargs"})
_TOOLS = frozenset({"tools", "tool_choice", "parallel_tool_calls"})
CHAT_FIELDS = _GENERATION | _TEMPLATE | _TOOLS | {"messages", "top_logprobs"}
RESPONSES_FIELDS = frozenset(
    [
        "model",
        "input",
        "instructions",
        "max_output_tokens",
        "include",
        "top_logprobs",
        "temperature",
        "top_p",
        "metadata",
        "text",
        "stream",
        "stream_options",
        "priority",
        "cache_salt",
        "top_k",
        "min_p",
        "seed",
        "stop",
        "stop_token_ids",
        "min_tokens",
        "ignore_eos",
        "allowed_token_ids",
        "bad_words",
        "logit_bias",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "chat_template_kwargs",
        *_TOOLS,
        ON_INFEASIBLE_FIELD,
        TIER_FIELD,
    ]
)
RESPONSES_TEXT_FIELDS = frozenset({"format"})
RESPONSES_TEXT_FORMAT_FIELDS = frozenset({"type", "name", "description", "schema", "strict"})
INPUT_FIELDS = frozenset({"type", "id", "role", "content", "status"})
INPUT_CALL_FIELDS = frozenset({"type", "id", "call_id", "name", "arguments", "status"})
INPUT_RESULT_FIELDS = frozenset({"type", "id", "call_id", "output", "status"})
TOKENIZE_FIELDS = (
    _TEMPLATE
    | _TOOLS
    | {
        "model",
        "prompt",
        "messages",
        "add_special_tokens",
        "truncate_prompt_tokens",
    }
)
DETOKENIZE_FIELDS = frozenset({"model", "tokens"})
LOAD_ADAPTER_FIELDS = frozenset({"lora_name", "lora_path", "load_inplace"})
UNLOAD_ADAPTER_FIELDS = frozenset({"lora_name"})
RESPONSE_FORMAT_FIELDS = frozenset({"type", "json_schema"})
JSON_SCHEMA_FIELDS = frozenset({"name", "description", "schema", "strict"})
STRUCTURED_OUTPUT_FIELDS = frozenset(
    [
        "json",
        "json_object",
        "regex",
        "choice",
        "grammar",
        "structural_tag",
        "whitespace_pattern",
        "disable_any_whitespace",
    ]
)
STREAM_FIELDS = frozenset({"include_usage", "continuous_usage_stats"})
MESSAGE_FIELDS = frozenset({"role", "content", "name", "tool_calls", "tool_call_id"})
TOOL_FIELDS = frozenset({"type", "function"})
FUNCTION_FIELDS = frozenset({"name", "description", "parameters", "strict"})
TOOL_CALL_FIELDS = frozenset({"id", "type", "index", "function"})
CALLED_FIELDS = frozenset({"name", "arguments"})

_HARMLESS = frozenset(
    [
        "user",
        "metadata",
        "store",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "prediction",
        "request_id",
        "include_reasoning",
        "parallel_tool_calls",
        "return_tokens_as_token_ids",
        "disable_fallback",
    ]
)
"""Fields that change nothing here, whatever their value."""

_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "logprobs": (False,),
    "top_logprobs": (0,),
    "prompt_logprobs": (),
    "echo": (False,),
    "suffix": ("",),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "logits_processors": ([],),
    "spaces_between_special_tokens": (True,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "background": (False,),
    "previous_response_id": (),
    "conversation": (),
    "max_tool_calls": (),
    "truncation": ("disabled",),
    "phase": ("final_answer",),
    "disable_additional_properties": (False,),
    "guided_decoding_backend": ("auto", "guidance"),
    "chat_template": (),
    "documents": ([],),
    "mm_processor_kwargs": ({},),
    "media_io_kwargs": ({},),
    "prompt_embeds": (),
    "kv_transfer_params": (),
    "vllm_xargs": ({},),
    "service_tier": ("auto", "default"),
    "reasoning_effort": ("none",),
    "thinking_token_budget": (),
    "verbosity": ("medium",),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "include_obfuscation": (False,),
    "return_token_strs": (False,),
    "refusal": (),
    "annotations": ([],),
    "reasoning": (),
    "reasoning_content": (),
}
"""Fields of OpenAI and vLLM that are not implemented, or not in each endpoint, with the values that
change nothing."""

_SLO = frozenset({*(names.field for names in PROMISES), BEST_EFFORT_FIELD})


def check_fields(body: Body, obeyed: frozenset[str], where: str = "") -> None:
    """Raise ApiError (400) for a field that would change the answer and is not obeyed.

    `where` is what stands before the names of fields in the message.  Misspelt SLO fields are left
    to `parse_slo`.
    """
    for name, value in body.items():
        if name in obeyed or name in _HARMLESS or name.startswith("slo_") or value is None:
            continue
        full_name = f"{where}{name:.100}"
        if name not in _NEUTRAL:
            hint = meant(name[:100], obeyed | _SLO)
            raise ApiError(
                400,
                f"{full_name} is not a field of this endpoint{hint}; leave it out",
                param=full_name,
            )
        if not any(_is_same(value, neutral) for neutral in _NEUTRAL[name]):
            raise ApiError(
                400, f"{full_name}={shown(value)} is not supported; leave it out", param=full_name
            )


def _is_same(value: object, other: object) -> bool:
    """Compare two values without taking true for 1."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)
