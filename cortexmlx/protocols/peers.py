"""The fields that clients of other servers send: of vLLM, SGLang, llama.cpp, mlx_lm.server, LM Studio, Ollama,
OpenRouter, and of hosts with the OpenAI API.

Every other unknown field is refused: it may be a typing error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

RENAMED: Mapping[str, str] = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "n_predict": "max_tokens",
    "random_seed": "seed",
    "reasoning_budget": "max_thinking_tokens",
    "repeat_last_n": "repetition_context",
    "repeat_penalty": "repetition_penalty",
    "repetition_context_size": "repetition_context",
    "thinking_budget": "max_thinking_tokens",
    "thinking_token_budget": "max_thinking_tokens",
}
"""Their names of parameters that are served."""

FORMS: Mapping[str, str] = {
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_json": "json",
    "guided_regex": "regex",
    "json_schema": "json",
}
"""Their names of forms, with the name that the form has in `structured_outputs`."""

THINKING = ("enable_thinking", "reasoning", "thinking")
"""Their fields of a chat that switch thoughts on and off."""

IGNORED = frozenset(
    {
        *(
            "cache_prompt",
            "id_slot",
            "n_indent",
            "n_keep",
            "parse_tool_calls",
            "post_sampling_probs",
            "return_progress",
        ),
        *("return_tokens", "samplers", "slot_id", "sse_ping_interval", "t_max_predict_ms", "timings_per_token"),
        *("cache_salt", "mm_processor_kwargs", "media_io_kwargs", "request_id", "return_token_ids"),
        *(
            "spaces_between_special_tokens",
            "rid",
            "separate_reasoning",
            "stream_reasoning",
            "return_cached_tokens_details",
        ),
        *("draft_model", "keep_alive", "num_draft_tokens", "ttl"),
        *("cache_control", "include_reasoning", "provider", "reasoning_format", "route", "session_id", "trace"),
        *("transforms", "usage", "stream_usage", "tool_stream", "user_id"),
        *("dry_allowed_length", "dry_base", "dry_penalty_last_n", "dry_sequence_breakers", "dynatemp_exponent"),
        *("mirostat_eta", "mirostat_tau", "xtc_threshold", "min_keep"),
    }
)
"""Fields that change no answer here: they are about the server, or belong to a field that is off."""

HARMLESS: Mapping[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (True, False),
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "continue_final_message": (False,),
    "documents": ([],),
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "enable_search": (False,),
    "grammar": ("",),
    "image_data": ([],),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "lora": ([],),
    "mirostat": (0,),
    "n_probs": (0,),
    "no_stop_trim": (False,),
    "plugins": ([],),
    "return_hidden_states": (False,),
    "return_tokens_as_token_ids": (False,),
    "safe_prompt": (False,),
    "tfs_z": (1,),
    "top_a": (0,),
    "top_n_sigma": (0, -1),
    "typical_p": (1,),
    "use_beam_search": (False,),
    "xtc_probability": (0,),
}
"""Fields that would change the answer, with the values that do not."""
