"""Validation of the fields of a JSON body: which are served, ignored, or refused, with those that other servers'
clients send.

Any other field is refused, too. It may be misspelt, and an answer without it would answer another question.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from cortexmlx.errors import InvalidRequest
from cortexmlx.protocols.error_text import warn_once
from cortexmlx.types.messages import suggest_name

_MAX_NAMED = 10
_MAX_SHOWN = 100
"""Characters of unknown names that an error repeats."""

ValueType = TypeVar("ValueType")


@dataclass(frozen=True)
class UnservedField:
    """A known field that is refused, because it would change the answer."""

    reason: str
    harmless_values: tuple[Any, ...] = ()
    """Values that do not change the answer. A field with one of them is accepted."""

    def refuse_unless_harmless(self, name: str, value: Any) -> None:
        """Raise InvalidRequest for the field `name`, unless its value is one of the `harmless_values`."""
        flag = isinstance(value, bool)
        if not any(isinstance(harmless, bool) is flag and value == harmless for harmless in self.harmless_values):
            raise InvalidRequest(f"{name!r} is not served: {self.reason}", field=name)


@dataclass(frozen=True)
class BodyFields:
    """The fields that one kind of JSON body may have: served, without effect, or refused with a reason."""

    body_name: str
    """The kind of body, as errors name it."""
    served: frozenset[str]
    no_effect: frozenset[str]
    unserved: Mapping[str, UnservedField]

    def exclude(self, unserved: Mapping[str, UnservedField]) -> BodyFields:
        """Return a copy in which these fields are refused, too."""
        return replace(self, served=self.served - unserved.keys(), unserved={**self.unserved, **unserved})

    def validate(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the served fields that are not null. Raises InvalidRequest for an unserved or unknown field."""
        return self.reject_unknown(self.reject_unserved(body))

    def reject_unserved(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return a body without nulls and without unserved fields that have a harmless value. Raises InvalidRequest for
        an unserved field with another value.
        """
        fields = {name: value for name, value in body.items() if value is not None}
        for name in sorted(fields.keys() & self.unserved.keys()):
            self.unserved[name].refuse_unless_harmless(name, fields.pop(name))
        for name in sorted(fields.keys() & UNSERVED_DEFAULTS.keys() - self.served):
            UnservedField("only its usual value is", UNSERVED_DEFAULTS[name]).refuse_unless_harmless(
                name, fields.pop(name)
            )
        return fields

    def reject_unknown(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields that have an effect, from `reject_unserved`'s result. Raises InvalidRequest for unknown."""
        ignored_names = fields.keys() & IGNORED - self.served - self.no_effect
        for name in sorted(ignored_names):
            warn_once(f"field {name}", f"{name!r} in the body of a request is ignored: it changes no answer here")
        effective = {name: value for name, value in fields.items() if name not in self.no_effect | ignored_names}
        reject_unknown_fields(effective, self.served, self.body_name)
        return effective


def reject_unknown_fields(names: Collection[str], known_names: Collection[str], label: str) -> None:
    """Raise InvalidRequest, which suggests similar names, if a name is not among the `known_names` of `label`."""
    unknown_names = [name for name in names if name not in known_names]
    if unknown_names:
        max_named = max(1, min(_MAX_NAMED, _MAX_SHOWN // max(1, *map(len, unknown_names))))
        names_text = ", ".join(
            f"{name!r:.80}" + suggest_name(name[:80], known_names) for name in unknown_names[:max_named]
        )
        if len(unknown_names) > max_named:
            names_text += f" and {len(unknown_names) - max_named} more"
        raise InvalidRequest(
            f"unknown field{'s' * (len(unknown_names) > 1)} of {label}: {names_text}", field=unknown_names[0]
        )


def require_type(name: str, value: object, kind: type[ValueType], must_be: str) -> ValueType:
    """Return the value of field `name`. Raises InvalidRequest, with `must_be` in its message, if its type is wrong."""
    if not isinstance(value, kind):
        raise InvalidRequest(f"{name} is {value!r:.80}, but must be {must_be}", field=name)
    return value


@contextmanager
def prefix_error_field(path: str) -> Iterator[None]:
    """Prefix the field of an InvalidRequest raised in this context: `messages[0]` + `role` = `messages[0].role`."""
    try:
        yield
    except InvalidRequest as error:
        dot = "" if not path or error.field is None or error.field.startswith("[") else "."
        error.field = path + dot + (error.field or "")
        raise


# The fields that clients of other servers send: of vLLM, SGLang, llama.cpp, mlx_lm.server, LM Studio, Ollama,
# OpenRouter, and of hosts with the OpenAI API.
#
# Every other unknown field is refused: it may be a typing error.


PEER_ALIASES: Mapping[str, str] = {
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
"""Their names of parameters that are served here, or, like `min_tokens`, for one value."""

PEER_FORMATS: Mapping[str, str] = {
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_json": "json",
    "guided_regex": "regex",
    "json_schema": "json",
}
"""Their names of forms, with the name that the form has in `structured_outputs`."""

PEER_THINKING = ("enable_thinking", "reasoning", "thinking")
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

UNSERVED_DEFAULTS: Mapping[str, tuple[Any, ...]] = {
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
