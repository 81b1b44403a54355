"""A model's tokenizer, shared by any number of threads."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property
from typing import Any

from cortexmlx.messages import NO_VARIABLES, THINKING, TemplateVars
from cortexmlx.models.tokenizers.base import Tokenizer
from cortexmlx.models.tokenizers.bytelevel import encode_with
from cortexmlx.models.tokenizers.detokenize import Detokenizer
from cortexmlx.models.tokenizers.least_tokens import LeastTokens, least_of_core, no_bound
from cortexmlx.models.tokenizers.templates import accepted_variables, reads_thoughts_field, thoughts_of, variables_read
from cortexmlx.request import Thoughts

_UNCHANGED = ("__call__", "encode", "_encode_plus", "apply_chat_template")


class SharedTokenizer:
    """Texts and messages to token ids and back, through our own tokenizers or what mlx-lm's loader gives.

    Ours and the tokenizers library's are safe to share. transformers' classes around the latter are not: on the way
    they set up truncation in the object that others are using. So that object is asked itself, where the class does
    nothing more than that. Everything else takes turns.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._core = None if isinstance(tokenizer, Tokenizer) else _rust_core(tokenizer)
        self._turns = threading.Lock()
        self._alone = self._core is None and not isinstance(tokenizer, Tokenizer)

    @property
    def bos_token(self) -> str | None:
        """The text of the token that texts begin with, if there is one."""
        bos: str | None = self._tokenizer.bos_token
        return bos

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The tokens that end an answer."""
        return frozenset(self._tokenizer.eos_token_ids)

    @cached_property
    def least_tokens(self) -> LeastTokens:
        """How many tokens a text has at least. The first use takes some 100 ms for a large vocabulary."""
        if self._core is not None:
            return least_of_core(self._core)
        return no_bound() if self._alone else self._tokenizer.least_tokens

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`."""
        if self._core is not None:
            return encode_with(self._core, text, add_special_tokens)
        if not self._alone:
            return list(self._tokenizer.encode(text, add_special_tokens))
        with self._turns:
            return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))

    @cached_property
    def template_vars(self) -> frozenset[str] | None:
        """The variables that the chat template reads: see `variables_read`."""
        return variables_read(self._tokenizer)

    def decode(self, tokens: Sequence[int], special_tokens: bool = False) -> str:
        """The text of token ids, as an answer of these tokens has it; with or without special tokens."""
        if isinstance(self._tokenizer, Tokenizer):
            return self._tokenizer.decode(tokens, skip_special_tokens=not special_tokens)
        hidden = frozenset[int]() if special_tokens else self._special_ids
        detokenizer = self._tokenizer.detokenizer
        with self._turns if self._alone else nullcontext():
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
        """The bytes that a token stands for by itself; none beyond the vocabulary."""
        with self._turns:
            if self._by_token is not None:
                return self._by_token.bytes_of(token)
            return str(self._tokenizer.decode([token])).encode("utf-8", "replace")

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
        """See the function of this name."""
        return reads_thoughts_field(self._tokenizer)

    def render(self, messages: Sequence[Mapping[str, Any]], variables: TemplateVars = NO_VARIABLES) -> str | list[int]:
        """Messages through the chat template, with the beginning of the answer: text whose special tokens are all
        written out, or its ids where the tokenizer does both in one. `variables` are the template's; raises
        InvalidRequest for those that it does not read.
        """
        options = {
            **(accepted_variables(variables, self.template_vars) if variables else {}),
            "add_generation_prompt": True,
        }
        if isinstance(self._tokenizer, Tokenizer):  # what mlx-lm's wrapper does with the others
            options = {THINKING: self.thoughts is not None, **options}
        if not self._alone:
            text: str = self._tokenizer.apply_chat_template(messages, tokenize=False, **options)
            return text
        with self._turns:
            return list(self._tokenizer.apply_chat_template(messages, **options))


def _rust_core(wrapper: Any) -> Any:
    """The tokenizers library's object inside mlx-lm's wrapper, if transformers does nothing to a text but hand it over;
    else None.
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
