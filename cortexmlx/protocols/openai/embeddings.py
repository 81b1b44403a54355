"""`/v1/embeddings`: the reader, and the body of a reply."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cortexmlx.errors import InvalidRequest
from cortexmlx.protocols.fields import Fields, Unserved, checked, inside
from cortexmlx.protocols.openai.parameters import flag
from cortexmlx.protocols.request import Body
from cortexmlx.structured.schemas import NO_TEXT, is_text
from cortexmlx.types.embeddings import EmbeddingInfo, Embeddings
from cortexmlx.types.messages import meant

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

URL = "/v1/embeddings"

MOST_INPUTS = 2048
"""Texts of one request, as in the OpenAI API."""

Text = str | list[int]
"""One text, or its token ids."""

_OWN_PROMPT = "name one of the model's own prompts with `prompt_name`, or write yours before the text"
_SPECIAL = "a model's embeddings are of texts with its special tokens"
_AS_THE_MODEL_SAYS = "vectors are as the model's files say"

UNPROMPTED = "is for texts: token ids are taken as they are, so put the prompt's own tokens before them"
"""Why there is no prompt before token ids."""

UNSERVED: Mapping[str, Unserved] = {
    "add_special_tokens": Unserved(_SPECIAL, (True,)),
    "embed_dtype": Unserved("vectors are float32", ("float32",)),
    "endianness": Unserved("base64 is of little-endian numbers", ("little", "native")),
    "input_type": Unserved(_OWN_PROMPT),
    "instruction": Unserved(_OWN_PROMPT),
    "messages": Unserved("send texts as `input`: they do not go through a chat template"),
    "normalize": Unserved(_AS_THE_MODEL_SAYS, (True,)),
    "padding": Unserved("texts are not padded", ("do_not_pad",)),
    "priority": Unserved("requests of a client go in order", (0,)),
    "prompt": Unserved(_OWN_PROMPT),
    "task": Unserved(_OWN_PROMPT),
    "truncation_side": Unserved("`truncate` cuts off the end", ("right",)),
    "use_activation": Unserved(_AS_THE_MODEL_SAYS, (True,)),
}

FIELDS = Fields(
    f"a {URL} body",
    frozenset({"dimensions", "encoding_format", "input", "prompt_name", "truncate", "truncate_prompt_tokens"}),
    frozenset({"cache_salt", "metadata", "model", "request_id", "safety_identifier", "user"}),
    UNSERVED,
)


@dataclass(frozen=True)
class EmbeddingRequest:
    """A body that was read and checked."""

    inputs: tuple[Text, ...]
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
    unserved: Mapping[str, Unserved] | None = None,
) -> EmbeddingRequest:
    """Return the request in a body. `info` and `vocab_size` are those of the model; None: they are not known yet, and
    what depends on them is not checked. `unserved` are fields that are not served here. Raises InvalidRequest, which
    names the field.
    """
    said = FIELDS.without(unserved or {}).given(body)
    inputs, prompt = _inputs(said.get("input"), vocab_size), checked_prompt(said.get("prompt_name"), info)
    if prompt is not None and not all(isinstance(each, str) for each in inputs):
        raise InvalidRequest(f"prompt_name {UNPROMPTED}", field="prompt_name")
    return EmbeddingRequest(
        inputs,
        prompt,
        checked_dimensions(said.get("dimensions"), info),
        truncates(said, None if info is None else info.max_tokens),
        _is_base64(said.get("encoding_format", "float")),
    )


def write(request: EmbeddingRequest, made: Embeddings, model: str, *, repeatable: bool = False) -> Body:
    """Return the body of a reply. `repeatable`: leave out what differs from run to run."""
    return {"object": "list", "data": list(data(request, made)), **_rest(made, model, repeatable)}


def data(request: EmbeddingRequest, made: Embeddings) -> Iterator[Body]:
    """Yield the item of each text. It has our own field `truncated` if its end was cut off."""
    for index, (vector, truncated) in enumerate(zip(made.vectors, made.truncated, strict=True)):
        item: Body = {"object": "embedding", "index": index, "embedding": written(vector, packed=request.base64)}
        yield {**item, "truncated": True} if truncated else item


def written(vector: npt.NDArray[np.float32], *, packed: bool) -> str | list[float]:
    """Return a vector as JSON has it: `packed` in base64, or as numbers with as many digits as a float32 needs."""
    if packed:
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return [float(f"{number:.9g}") for number in vector.tolist()]


def without_data(made: Embeddings, model: str) -> Body:
    """Return the body of a reply without its items, for a writer that writes them one by one."""
    return {"object": "list", **_rest(made, model, False)}


def usage_body(prompt: int, cached: int, repeatable: bool = False) -> Body:
    """Return the tokens of a request that asks for no answer in words."""
    usage: Body = {"prompt_tokens": prompt, "total_tokens": prompt}
    return usage if repeatable else {**usage, "prompt_tokens_details": {"cached_tokens": cached}}


def truncates(said: Mapping[str, Any], max_tokens: int | None) -> bool:
    """Return whether texts that are too long are cut off: our own `truncate`, or vLLM's `truncate_prompt_tokens` with
    -1 or the model's own limit `max_tokens` (None: it is not known). Raises InvalidRequest.
    """
    most = said.get("truncate_prompt_tokens")
    if most is None:
        return flag(said, "truncate")
    if type(most) is not int or most < -1 or (most != -1 and max_tokens is not None and most < max_tokens):
        limit = "the model's own limit" if max_tokens is None else f"the model's own limit, {max_tokens:,}"
        message = f"truncate_prompt_tokens is {most!r:.80}, but must be -1: texts are cut off at {limit}, or not at all"
        raise InvalidRequest(message, field="truncate_prompt_tokens")
    return True


def vectors_of_adapter(name: str) -> InvalidRequest:
    """Return the error of a request for vectors or scores that names an adapter."""
    why = f"model is {name!r:.200}, but vectors and scores are the model's alone: leave out the adapter"
    return InvalidRequest(why, field="model")


def checked_text(text: str, name: str) -> str:
    """Return the same text. `name` is its name in errors. Raises InvalidRequest if there is nothing to embed."""
    if not text:
        raise InvalidRequest(f"{name} is empty")
    if not is_text(text):
        raise InvalidRequest(f"{name} {NO_TEXT}")
    return text


def _rest(made: Embeddings, model: str, repeatable: bool) -> Body:
    return {"model": model, "usage": usage_body(sum(made.prompt_tokens), sum(made.cached_tokens), repeatable)}


def _inputs(given: Any, vocab_size: int | None) -> tuple[Text, ...]:
    """Return the texts of a body: a text, token ids, or a list of either."""
    with inside("input"):
        if given is None or given == []:
            raise InvalidRequest("`input` is missing" if given is None else "`input` has no texts")
        if not isinstance(given, list) or type(given[0]) is int:
            return (read_text(given, "`input`", vocab_size),)
        if len(given) > MOST_INPUTS:
            message = f"`input` has {len(given):,} texts, but must have {MOST_INPUTS:,} at most: send several requests"
            raise InvalidRequest(message)
        return tuple(_one(each, place, vocab_size) for place, each in enumerate(given))


def read_text(given: Any, name: str, vocab_size: int | None = None) -> Text:
    """Return one text, or its token ids. `name` is its name in errors. Raises InvalidRequest."""
    if isinstance(given, str):
        return checked_text(given, name)
    if not isinstance(given, list):
        raise InvalidRequest(f"{name} is {given!r:.80}, but must be a text or a list of token ids")
    if not given:
        raise InvalidRequest(f"{name} has no tokens")
    return _tokens(given, name, vocab_size)


def _one(given: Any, place: int, vocab_size: int | None) -> Text:
    with inside(f"[{place}]"):
        return read_text(given, f"text {place} of `input`", vocab_size)


def _tokens(given: list[Any], name: str, vocab_size: int | None) -> list[int]:
    for token in given:
        if type(token) is not int:
            raise InvalidRequest(f"{name} has {token!r:.80} among its token ids, but they must be integers")
        if token < 0 or (vocab_size is not None and token >= vocab_size):
            most = "" if vocab_size is None else f" below {vocab_size:,}"
            raise InvalidRequest(
                f"{name} has the token id {token!r:.40}, but the model's are integers from 0{most}: "
                "send texts, unless the tokens are of the model's own tokenizer"
            )
    return given


def checked_prompt(name: Any, info: EmbeddingInfo | None) -> str | None:
    """Return the name of one of the model's prompts, or None. Raises InvalidRequest."""
    if name is None:
        return None
    checked("prompt_name", name, str, "a text")
    if info is not None and name not in info.prompts:
        there = ", ".join(map(repr, info.prompts)) or "none"
        message = f"the model has no prompt {name!r:.80}{meant(name[:80], info.prompts)}: it has {there}"
        raise InvalidRequest(message, field="prompt_name")
    return str(name)


def checked_dimensions(count: Any, info: EmbeddingInfo | None) -> int | None:
    """Return how many numbers vectors have, or None for the model's own number. Raises InvalidRequest."""
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


def _is_base64(form: Any) -> bool:
    if form not in ("float", "base64"):
        raise InvalidRequest(f"encoding_format is {form!r:.80}, but must be float or base64", field="encoding_format")
    return bool(form == "base64")
