"""A model's tokenizer that any number of threads can share."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from cortexmlx.models.tokenizers.base import Tokenizer
from cortexmlx.models.tokenizers.bytelevel import encode_with
from cortexmlx.models.tokenizers.detokenize import Detokenizer
from cortexmlx.models.tokenizers.fitting import Fitting
from cortexmlx.models.tokenizers.least_tokens import LeastTokens, least_of_core, no_bound
from cortexmlx.models.tokenizers.templates import (
    accepted_variables,
    call_format_of,
    reads_thoughts_field,
    thoughts_of,
    variables_read,
)
from cortexmlx.structured.calls.format import CallFormat
from cortexmlx.structured.output import Thoughts
from cortexmlx.types.messages import NO_VARIABLES, THINKING, TemplateVars


@dataclass(frozen=True)
class TokenTable:
    """What each token of a vocabulary stands for."""

    pieces: tuple[bytes, ...]
    """The bytes of each token by its id; empty for an id without a token."""
    special: frozenset[int]
    """Tokens that are no text, such as the end of a turn."""
    ends: frozenset[int]
    """Tokens that end an answer."""
    drops_space: bool
    """Whether a space at the beginning of an answer is no part of its text."""


LONG = 1 << 18
"""Characters of a text that is long: it takes 60 MB and 0.2 s."""

_UNCHANGED = ("__call__", "encode", "_encode_plus", "apply_chat_template")


class SharedTokenizer:
    """Converts texts and messages to token ids and back, with our own tokenizers or the one from mlx-lm's loader.

    Our tokenizers and those of the tokenizers library are safe to share. The classes of transformers around the latter
    are not: they set up truncation in the shared object. So the library's object is called directly if the class does
    nothing else. All other tokenizers are used by one thread at a time.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._core = None if isinstance(tokenizer, Tokenizer) else _rust_core(tokenizer)
        self._lock = threading.Lock()
        self._long = threading.Lock()
        self._takes_turns = self._core is None and not isinstance(tokenizer, Tokenizer)

    @property
    def bos_token(self) -> str | None:
        """The text of the token that texts begin with; None if there is no such token."""
        bos: str | None = self._tokenizer.bos_token
        return bos

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The ids of the tokens that end an answer."""
        return frozenset(self._tokenizer.eos_token_ids)

    @cached_property
    def least_tokens(self) -> LeastTokens:
        """The lower bound of a text's tokens. The first use takes some 100 ms for a large vocabulary."""
        if self._core is not None:
            return least_of_core(self._core)
        return no_bound() if self._takes_turns else self._tokenizer.least_tokens

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of `text`. Long texts take turns: a character takes up to 250 bytes meanwhile."""
        with self._lock if self._takes_turns else self._long if len(text) >= LONG else nullcontext():
            if self._core is not None:
                return encode_with(self._core, text, add_special_tokens)
            return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))

    @cached_property
    def template_vars(self) -> frozenset[str] | None:
        """The variables that the chat template reads: see `variables_read`."""
        return variables_read(self._tokenizer)

    def decode(self, tokens: Sequence[int], special_tokens: bool = False) -> str:
        """Return the text that an answer of these tokens has, with or without special tokens."""
        if isinstance(self._tokenizer, Tokenizer):
            return self._tokenizer.decode(tokens, skip_special_tokens=not special_tokens)
        hidden = frozenset[int]() if special_tokens else self._special_ids
        detokenizer = self._tokenizer.detokenizer
        with self._lock if self._takes_turns else nullcontext():
            for token in tokens:
                if token not in hidden:
                    detokenizer.add_token(token)
            detokenizer.finalize()
        text: str = detokenizer.text
        return text

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        return frozenset(self._tokenizer.all_special_ids)

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes that one token stands for. They are empty for an id beyond the vocabulary."""
        with self._lock:
            if self._by_token is not None:
                return self._by_token.bytes_of(token)
            return str(self._tokenizer.decode([token])).encode("utf-8", "replace")

    def token_table(self, size: int) -> TokenTable | None:
        """Return what the tokens `0 .. size` of the vocabulary stand for. None if they have no bytes of their own,
        because their text depends on the tokens before them.
        """
        with self._lock:
            detokenizer = self._by_token
            if detokenizer is None or not detokenizer.exact:
                return None
            if isinstance(self._tokenizer, Tokenizer):
                special = self._tokenizer.special_ids
            else:
                added = getattr(self._tokenizer, "added_tokens_decoder", {}).items()
                special = self._special_ids.union(token for token, text in added if text.special)
            pieces = tuple(detokenizer.bytes_of(token) for token in range(size))
            return TokenTable(pieces, special, self.eos_token_ids, detokenizer.drops_space)

    @cached_property
    def _by_token(self) -> Detokenizer | None:
        detokenizer = self._tokenizer.detokenizer
        return detokenizer if isinstance(detokenizer, Detokenizer) else None

    @cached_property
    def thoughts(self) -> Thoughts | None:
        """How the model marks its thoughts: see `thoughts_of`."""
        return thoughts_of(self._tokenizer)

    @cached_property
    def reads_thoughts_field(self) -> bool:
        """Whether the chat template reads an earlier answer's thoughts from a field: see the function of this name."""
        return reads_thoughts_field(self._tokenizer)

    @cached_property
    def call_format(self) -> CallFormat | None:
        """How the model writes tool calls. None if that is not known, or if its chat template reads no tools."""
        return call_format_of(self._tokenizer)

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        variables: TemplateVars = NO_VARIABLES,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str | list[int]:
        """Return the messages rendered by the chat template, with the beginning of the answer.

        The result is a text in which all special tokens are written out. It is a list of ids if the tokenizer renders
        and encodes in one call. `variables` are the template's. Messages that the template refuses, or of which it
        would lose a part, are repaired: see `Fitting`. Raises InvalidRequest for variables that the template does not
        read.
        """
        options = {
            **(accepted_variables(variables, self.template_vars) if variables else {}),
            "add_generation_prompt": True,
        }
        if tools:
            options["tools"] = list(tools)
        if isinstance(self._tokenizer, Tokenizer):  # as mlx-lm's wrapper does for other tokenizers
            options = {THINKING: self.thoughts is not None, **options}
        return self._fitting.rendered(messages, partial(self._rendered, options))

    @cached_property
    def _fitting(self) -> Fitting:
        return Fitting(partial(self._rendered, {"add_generation_prompt": True}))

    def _rendered(self, options: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]) -> str | list[int]:
        if not self._takes_turns:
            text: str = self._tokenizer.apply_chat_template(messages, tokenize=False, **options)
            return text
        with self._lock:
            return list(self._tokenizer.apply_chat_template(messages, **options))


def _rust_core(wrapper: Any) -> Any:
    """Return the tokenizers library's object inside mlx-lm's wrapper if transformers only passes texts on to it; None
    otherwise.
    """
    inner = getattr(wrapper, "_tokenizer", None)
    if inner is None:
        return None
    from transformers import PreTrainedTokenizerFast as Plain

    same = isinstance(inner, Plain) and all(getattr(type(inner), n) is getattr(Plain, n) for n in _UNCHANGED)
    if not same:
        return None
    core = inner.backend_tokenizer
    core.no_truncation()
    core.no_padding()
    core.encode_special_tokens = inner.split_special_tokens
    return core
