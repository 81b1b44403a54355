"""A model's tokenizer that any number of threads can share."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from cortexmlx.models.tokenizers.base import Tokenizer
from cortexmlx.models.tokenizers.bytelevel import encode_without_gil
from cortexmlx.models.tokenizers.detokenize import StreamingDetokenizer
from cortexmlx.models.tokenizers.fitting import ConversationFitter
from cortexmlx.models.tokenizers.least_tokens import TokenLowerBound, bound_for_core, zero_bound
from cortexmlx.models.tokenizers.templates import (
    accept_variables,
    find_call_format,
    find_thought_marks,
    find_tokenizer_variables,
    reads_thoughts_field,
)
from cortexmlx.structured.calls.format import CallFormat
from cortexmlx.structured.output import Thoughts
from cortexmlx.types.images import ImageWriter
from cortexmlx.types.messages import NO_VARIABLES, THINKING, TemplateVars


@dataclass(frozen=True)
class TokenTable:
    """The bytes of each token of a vocabulary, and which tokens are special or end an answer."""

    pieces: tuple[bytes, ...]
    """The bytes of each token by its id; empty for an id without a token."""
    special: frozenset[int]
    """Tokens that are no text, such as the end of a turn."""
    end_ids: frozenset[int]
    """Tokens that end an answer."""
    drops_space: bool
    """Whether a space at the beginning of an answer is no part of its text."""


LONG_TEXT = 1 << 18
"""Characters of a text that is long: it takes 60 MB and 0.2 s."""

_INHERITED_METHODS = ("__call__", "encode", "_encode_plus", "apply_chat_template")


class SharedTokenizer:
    """A thread-safe tokenizer around ours or mlx-lm's: converts texts and messages to token ids and back.

    Our tokenizers and those of the tokenizers library are safe to share. The classes of transformers around the latter
    are not: they set up truncation in the shared object. So the library's object is called directly if the class does
    nothing else. All other tokenizers are used by one thread at a time.
    """

    def __init__(self, tokenizer: Any, images: ImageWriter | None = None) -> None:
        """`images` reads the images in messages; None: the model sees none."""
        self._tokenizer = tokenizer
        self.images = images
        self._core = None if isinstance(tokenizer, Tokenizer) else _rust_core(tokenizer)
        self._lock = threading.Lock()
        self._long_text_lock = threading.Lock()
        self._takes_turns = self._core is None and not isinstance(tokenizer, Tokenizer)

    @property
    def bos_token(self) -> str | None:
        """The text of the token that prompts begin with; None if there is none."""
        bos: str | None = self._tokenizer.bos_token
        return bos

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The ids of the tokens that end an answer."""
        return frozenset(self._tokenizer.eos_token_ids)

    @cached_property
    def token_lower_bound(self) -> TokenLowerBound:
        """A lower bound on the number of tokens of any text. The first use takes some 100 ms for a large vocabulary."""
        if self._core is not None:
            return bound_for_core(self._core)
        return zero_bound() if self._takes_turns else self._tokenizer.token_lower_bound

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of `text`. Long ones are encoded one at a time, as each takes up to 250 bytes a character."""
        if self.images is not None and (parts := self.images.split(text)) is not None:
            before, *after = ([*part] if isinstance(part, tuple) else self._encode(part, False) for part in parts[1:])
            return [*self._encode(parts[0], add_special_tokens), *before, *itertools.chain(*after)]
        return self._encode(text, add_special_tokens)

    def _encode(self, text: Any, add_special_tokens: bool) -> list[int]:
        with self._lock if self._takes_turns else self._long_text_lock if len(text) >= LONG_TEXT else nullcontext():
            if self._core is not None:
                return encode_without_gil(self._core, text, add_special_tokens)
            return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))

    @cached_property
    def template_vars(self) -> frozenset[str] | None:
        """The variables that the chat template reads; None if they are unknown."""
        return find_tokenizer_variables(self._tokenizer)

    def decode(self, tokens: Sequence[int], special_tokens: bool = False) -> str:
        """Return the text of an answer's tokens, with or without special tokens."""
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
        """Return the bytes of one token; empty for an id beyond the vocabulary."""
        with self._lock:
            if self._own_detokenizer is not None:
                return self._own_detokenizer.token_bytes(token)
            return str(self._tokenizer.decode([token])).encode("utf-8", "replace")

    def token_table(self, size: int) -> TokenTable | None:
        """Return the bytes of the tokens `0 .. size`. None if a token's text depends on the tokens before it."""
        with self._lock:
            detokenizer = self._own_detokenizer
            if detokenizer is None or not detokenizer.exact:
                return None
            if isinstance(self._tokenizer, Tokenizer):
                special = self._tokenizer.special_ids
            else:
                added_tokens = getattr(self._tokenizer, "added_tokens_decoder", {}).items()
                special = self._special_ids.union(token for token, text in added_tokens if text.special)
            pieces = tuple(detokenizer.token_bytes(token) for token in range(size))
            return TokenTable(pieces, special, self.eos_token_ids, detokenizer.drops_space)

    @cached_property
    def _own_detokenizer(self) -> StreamingDetokenizer | None:
        """Our detokenizer for this tokenizer's kind of tokens; None if the kind is unknown."""
        detokenizer = self._tokenizer.detokenizer
        return detokenizer if isinstance(detokenizer, StreamingDetokenizer) else None

    @cached_property
    def thoughts(self) -> Thoughts | None:
        """The marks that the model puts around its thoughts; None if it does not think."""
        return find_thought_marks(self._tokenizer)

    @cached_property
    def reads_thoughts_field(self) -> bool:
        """Whether the chat template reads the thoughts of an earlier answer from a separate field."""
        return reads_thoughts_field(self._tokenizer)

    @cached_property
    def call_format(self) -> CallFormat | None:
        """The format of the model's tool calls. None if it is unknown, or if the chat template reads no tools."""
        return find_call_format(self._tokenizer)

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        variables: TemplateVars = NO_VARIABLES,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str | list[int]:
        """Return the messages rendered by the chat template, with the beginning of the answer.

        The result is a text in which all special tokens are written out. It is a list of ids if the tokenizer renders
        and encodes in one call. `variables` are the template's. Messages that the template refuses, or of which it
        would lose a part, are repaired: see `ConversationFitter`. Raises InvalidRequest for variables that the
        template does not read.
        """
        options = {
            **(accept_variables(variables, self.template_vars) if variables else {}),
            "add_generation_prompt": True,
        }
        if tools:
            options["tools"] = list(tools)
        if isinstance(self._tokenizer, Tokenizer):  # as mlx-lm's wrapper does for other tokenizers
            options = {THINKING: self.thoughts is not None, **options}
        return self._fitter.render(messages, partial(self._apply_template, options))

    @cached_property
    def _fitter(self) -> ConversationFitter:
        """Repairs messages that the chat template refuses, or of which it would lose a part."""
        return ConversationFitter(partial(self._apply_template, {"add_generation_prompt": True}))

    def _apply_template(self, options: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]) -> str | list[int]:
        """Render the messages as they are by the chat template: to text, or to ids if the tokenizer encodes itself."""
        if not self._takes_turns:
            text: str = self._tokenizer.apply_chat_template(messages, tokenize=False, **options)
            return text
        with self._lock:
            return list(self._tokenizer.apply_chat_template(messages, **options))


def _rust_core(wrapper: Any) -> Any:
    """Return the tokenizers library's object in mlx-lm's wrapper; None if transformers changes what it encodes."""
    tokenizer = getattr(wrapper, "_tokenizer", None)
    if tokenizer is None:
        return None
    from transformers import PreTrainedTokenizerFast as Plain

    is_plain = isinstance(tokenizer, Plain) and all(
        getattr(type(tokenizer), n) is getattr(Plain, n) for n in _INHERITED_METHODS
    )
    if not is_plain:
        return None
    core = tokenizer.backend_tokenizer
    core.no_truncation()
    core.no_padding()
    core.encode_special_tokens = tokenizer.split_special_tokens
    return core
