"""`/v1/embeddings`: the reader, and the body of a reply."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cortexmlx.errors import InvalidRequest
from cortexmlx.protocols.fields import BodyFields, UnservedField, prefix_error_field, require_type
from cortexmlx.protocols.openai.parameters import read_flag
from cortexmlx.protocols.request import Body
from cortexmlx.structured.schemas import NO_TEXT, is_text
from cortexmlx.types.embeddings import EmbeddingInfo, Embeddings
from cortexmlx.types.messages import suggest_name

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

URL = "/v1/embeddings"

MAX_INPUTS = 2048
"""Texts of one request, as in the OpenAI API."""

TextOrTokens = str | list[int]
"""One text, or its token ids."""

_USE_PROMPT_NAME = "name one of the model's own prompts with `prompt_name`, or write yours before the text"
_SPECIAL_TOKENS = "a model's embeddings are of texts with its special tokens"
_MODEL_DECIDES = "vectors are as the model's files say"

NO_PROMPT_FOR_TOKENS = "is for texts: token ids are taken as they are, so put the prompt's own tokens before them"
"""Why there is no prompt before token ids."""

UNSERVED: Mapping[str, UnservedField] = {
    "add_special_tokens": UnservedField(_SPECIAL_TOKENS, (True,)),
    "embed_dtype": UnservedField("vectors are float32", ("float32",)),
    "endianness": UnservedField("base64 is of little-endian numbers", ("little", "native")),
    "input_type": UnservedField(_USE_PROMPT_NAME),
    "instruction": UnservedField(_USE_PROMPT_NAME),
    "messages": UnservedField("send texts as `input`: they do not go through a chat template"),
    "normalize": UnservedField(_MODEL_DECIDES, (True,)),
    "padding": UnservedField("texts are not padded", ("do_not_pad",)),
    "priority": UnservedField("requests of a client go in order", (0,)),
    "prompt": UnservedField(_USE_PROMPT_NAME),
    "task": UnservedField(_USE_PROMPT_NAME),
    "truncation_side": UnservedField("`truncate` cuts off the end", ("right",)),
    "use_activation": UnservedField(_MODEL_DECIDES, (True,)),
}

FIELDS = BodyFields(
    f"a {URL} body",
    frozenset({"dimensions", "encoding_format", "input", "prompt_name", "truncate", "truncate_prompt_tokens"}),
    frozenset({"cache_salt", "metadata", "model", "request_id", "safety_identifier", "user"}),
    UNSERVED,
)


@dataclass(frozen=True)
class EmbeddingRequest:
    """A checked request for embeddings: the texts, and how their vectors are made and written."""

    inputs: tuple[TextOrTokens, ...]
    prompt: str | None = None
    """The name of the model's prompt that goes before each text; None: the model's default."""
    dimensions: int | None = None
    """Numbers of each vector; None: as many as the model has."""
    truncate: bool = False
    """Whether texts that are too long are cut off. False: they are refused."""
    base64: bool = False
    """Whether vectors are written in base64, as little-endian float32."""


def read(
    body: Mapping[str, Any],
    info: EmbeddingInfo | None = None,
    vocab_size: int | None = None,
    unserved: Mapping[str, UnservedField] | None = None,
) -> EmbeddingRequest:
    """Parse the JSON body of a `/v1/embeddings` call. `info` and `vocab_size` are the model's; None: not known yet, so
    what depends on them is not checked. `unserved` are fields to refuse here. Raises InvalidRequest.
    """
    fields = FIELDS.exclude(unserved or {}).validate(body)
    inputs, prompt = _read_inputs(fields.get("input"), vocab_size), read_prompt_name(fields.get("prompt_name"), info)
    if prompt is not None and not all(isinstance(each, str) for each in inputs):
        raise InvalidRequest(f"prompt_name {NO_PROMPT_FOR_TOKENS}", field="prompt_name")
    return EmbeddingRequest(
        inputs,
        prompt,
        read_dimensions(fields.get("dimensions"), info),
        read_truncate(fields, None if info is None else info.max_tokens),
        _wants_base64(fields.get("encoding_format", "float")),
    )


def write(request: EmbeddingRequest, embeddings: Embeddings, model: str, *, repeatable: bool = False) -> Body:
    """Return the JSON body of a reply with embeddings. `repeatable`: leave out what differs from run to run."""
    return {
        "object": "list",
        "data": list(embedding_items(request, embeddings)),
        **_model_and_usage(embeddings, model, repeatable),
    }


def embedding_items(request: EmbeddingRequest, embeddings: Embeddings) -> Iterator[Body]:
    """Yield the item of each text's vector. It has our own field `is_truncated` if the text's end was cut off."""
    for index, (vector, is_truncated) in enumerate(zip(embeddings.vectors, embeddings.truncated, strict=True)):
        item: Body = {"object": "embedding", "index": index, "embedding": encode_vector(vector, packed=request.base64)}
        yield {**item, "truncated": True} if is_truncated else item


def encode_vector(vector: npt.NDArray[np.float32], *, packed: bool) -> str | list[float]:
    """Return a vector as JSON has it: `packed` in base64, or as numbers with as many digits as a float32 needs."""
    if packed:
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return [float(f"{number:.9g}") for number in vector.tolist()]


def reply_without_items(embeddings: Embeddings, model: str) -> Body:
    """Return the body of a reply without its `data`, for a server that writes the items one by one."""
    return {"object": "list", **_model_and_usage(embeddings, model, False)}


def usage_body(prompt: int, cached: int, repeatable: bool = False) -> Body:
    """Return the `usage` of a request that generates no text."""
    usage: Body = {"prompt_tokens": prompt, "total_tokens": prompt}
    return usage if repeatable else {**usage, "prompt_tokens_details": {"cached_tokens": cached}}


def read_truncate(fields: Mapping[str, Any], max_tokens: int | None) -> bool:
    """Return whether too long texts are cut off, as `truncate` or vLLM's `truncate_prompt_tokens` says. The latter
    must be -1, or at least the model's own limit `max_tokens` (None: not known, so not checked). Raises
    InvalidRequest.
    """
    token_limit = fields.get("truncate_prompt_tokens")
    if token_limit is None:
        return read_flag(fields, "truncate")
    if (
        type(token_limit) is not int
        or token_limit < -1
        or (token_limit != -1 and max_tokens is not None and token_limit < max_tokens)
    ):
        limit = "the model's own limit" if max_tokens is None else f"the model's own limit, {max_tokens:,}"
        requirement = f"-1: texts are cut off at {limit}, or not at all"
        message = f"truncate_prompt_tokens is {token_limit!r:.80}, but must be {requirement}"
        raise InvalidRequest(message, field="truncate_prompt_tokens")
    return True


def unsupported_adapter_error(name: str) -> InvalidRequest:
    """Return the error of a request for embeddings or scores that names an adapter."""
    message = f"model is {name!r:.200}, but vectors and scores are the model's alone: leave out the adapter"
    return InvalidRequest(message, field="model")


def require_text(text: str, name: str) -> str:
    """Return a text unchanged. Raises InvalidRequest, which calls it `name`, if it is empty or invalid."""
    if not text:
        raise InvalidRequest(f"{name} is empty")
    if not is_text(text):
        raise InvalidRequest(f"{name} {NO_TEXT}")
    return text


def _model_and_usage(embeddings: Embeddings, model: str, repeatable: bool) -> Body:
    return {
        "model": model,
        "usage": usage_body(sum(embeddings.prompt_tokens), sum(embeddings.cached_tokens), repeatable),
    }


def _read_inputs(value: Any, vocab_size: int | None) -> tuple[TextOrTokens, ...]:
    """Return the texts in the field `input`: one text, its token ids, or a list of either. Raises InvalidRequest."""
    with prefix_error_field("input"):
        if value is None or value == []:
            raise InvalidRequest("`input` is missing" if value is None else "`input` has no texts")
        if not isinstance(value, list) or type(value[0]) is int:
            return (read_input(value, "`input`", vocab_size),)
        if len(value) > MAX_INPUTS:
            message = f"`input` has {len(value):,} texts, but must have {MAX_INPUTS:,} at most: send several requests"
            raise InvalidRequest(message)
        return tuple(_read_listed_input(each, index, vocab_size) for index, each in enumerate(value))


def read_input(value: Any, name: str, vocab_size: int | None = None) -> TextOrTokens:
    """Return one text or its token ids, checked. `name` is what errors call it. Raises InvalidRequest."""
    if isinstance(value, str):
        return require_text(value, name)
    if not isinstance(value, list):
        raise InvalidRequest(f"{name} is {value!r:.80}, but must be a text or a list of token ids")
    if not value:
        raise InvalidRequest(f"{name} has no tokens")
    return _check_token_ids(value, name, vocab_size)


def _read_listed_input(value: Any, index: int, vocab_size: int | None) -> TextOrTokens:
    """Return one text of a list. `index` is its index, for errors."""
    with prefix_error_field(f"[{index}]"):
        return read_input(value, f"text {index} of `input`", vocab_size)


def _check_token_ids(token_ids: list[Any], name: str, vocab_size: int | None) -> list[int]:
    """Return token ids unchanged. Raises InvalidRequest if one is not in the vocabulary."""
    for token in token_ids:
        if type(token) is not int:
            raise InvalidRequest(f"{name} has {token!r:.80} among its token ids, but they must be integers")
        if token < 0 or (vocab_size is not None and token >= vocab_size):
            bound_text = "" if vocab_size is None else f" below {vocab_size:,}"
            raise InvalidRequest(
                f"{name} has the token id {token!r:.40}, but the model's are integers from 0{bound_text}: "
                "send texts, unless the tokens are of the model's own tokenizer"
            )
    return token_ids


def read_prompt_name(name: Any, info: EmbeddingInfo | None) -> str | None:
    """Return the field `prompt_name`, the name of one of the model's prompts, or None. Raises InvalidRequest."""
    if name is None:
        return None
    require_type("prompt_name", name, str, "a text")
    if info is not None and name not in info.prompts:
        prompt_names = ", ".join(map(repr, info.prompts)) or "none"
        message = f"the model has no prompt {name!r:.80}{suggest_name(name[:80], info.prompts)}: it has {prompt_names}"
        raise InvalidRequest(message, field="prompt_name")
    return str(name)


def read_dimensions(count: Any, info: EmbeddingInfo | None) -> int | None:
    """Return the vectors' size from the field `dimensions`, or None for the model's own. Raises InvalidRequest."""
    if count is None:
        return None
    if type(count) is not int or count < 1:
        raise InvalidRequest(f"dimensions is {count!r:.80}, but must be an integer above 0", field="dimensions")
    if info is not None and count > info.dimensions:
        message = (
            f"dimensions is {count!r:.80}, but the model's vectors have {info.dimensions:,}: ask for that or fewer"
        )
        raise InvalidRequest(message, field="dimensions")
    return count


def _wants_base64(form: Any) -> bool:
    """Whether `encoding_format` asks for base64. Raises InvalidRequest for an unknown format."""
    if form not in ("float", "base64"):
        raise InvalidRequest(f"encoding_format is {form!r:.80}, but must be float or base64", field="encoding_format")
    return bool(form == "base64")
