"""Texts to be embedded, as tokens: with the prompt before each and special tokens around it, cut where that is wanted.

It follows sentence-transformers: prompt and text are one text, without blanks around it, and a text that is too long
loses its end, but not its special tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from numbers import Integral
from typing import Any

from cortexmlx.core.arguments import is_list
from cortexmlx.core.embedding.first_tokens import at_least, first_tokens
from cortexmlx.errors import EmbeddingRefused
from cortexmlx.kv.prefix import common_length
from cortexmlx.models.embedding import EmbeddingFiles
from cortexmlx.models.tokenizers.shared import SharedTokenizer
from cortexmlx.types.embeddings import EmbeddingInfo, Pooled


@dataclass(frozen=True)
class PooledText:
    """A text that is ready to be computed."""

    tokens: tuple[int, ...]
    """Those that are computed."""
    pooled: Pooled
    divisor: float
    """By what the sum of the states is divided."""
    count: int
    """Tokens of the text, also those after the last state that counts."""
    truncated: bool


class TextReader:
    """Makes tokens of texts, with one prompt before all of them."""

    def __init__(
        self,
        tokenizer: SharedTokenizer,
        files: EmbeddingFiles,
        info: EmbeddingInfo,
        vocab_size: int,
        prompt: str | None,
        truncate: bool,
        bound: str,
    ) -> None:
        """`prompt` is a name of the model's prompts; None: its default. With `truncate`, the end of a text that is too
        long is cut off. `bound` says what bounds texts, for errors. Raises EmbeddingRefused for an unknown prompt.
        """
        self._tokenizer = tokenizer
        self._files = files
        self._most = info.max_tokens
        self._vocab_size = vocab_size
        self._asked = prompt
        self._truncate = truncate
        self._bound = bound
        name = info.default_prompt if prompt is None else prompt
        if name is not None and name not in info.prompts:
            known = ", ".join(map(repr, sorted(info.prompts))) or "none"
            raise EmbeddingRefused(f"the model has no prompt {name!r:.80}: its files name {known}")
        self._prompt = "" if name is None else self._cased(info.prompts[name])
        self._begin, self._end = _special_tokens(tokenizer)
        self._head = [*self._begin, *self._encode(self._prompt.lstrip())] if self._prompt else []
        self._unpooled = 0  # tokens at the beginning of each text whose states do not count
        if self._prompt and not files.include_prompt:
            self._unpooled = len(self._begin) + len(self._encode(self._prompt.strip()))

    def read(self, place: int, text: str | Sequence[int]) -> PooledText:
        """Return a text as tokens; `place` is its index, for errors. Token ids are taken as they are. Raises
        EmbeddingRefused if it is none, is empty, or is too long.
        """
        if isinstance(text, str):
            whole = self._cased(self._prompt + text.encode("utf-8", "replace").decode()).strip()
            body, said = first_tokens(self._encode, whole, self._most), at_least(whole)
        else:
            body, said = self._ids(place, text), ""
        begin, end = (self._begin, self._end) if isinstance(text, str) else ((), ())
        count = len(begin) + len(body) + len(end)
        if not count:
            raise EmbeddingRefused(f"text {place} is empty, and has no vector")
        truncated = count > self._most
        if truncated and not self._truncate:
            raise EmbeddingRefused(
                f"text {place} has {said}{count} tokens, and {self._bound}: shorten it, or cut off its end with "
                "`truncate`"
            )
        tokens = [*begin, *body[: max(self._most - len(begin) - len(end), 0)], *end][: self._most]
        return self._pooled(place, tokens, truncated, self._unpooled if isinstance(text, str) else 0)

    def _pooled(self, place: int, tokens: list[int], truncated: bool, first: int) -> PooledText:
        """Return a text whose states count from its token `first` on."""
        count, files = len(tokens), self._files
        if first >= count:
            raise EmbeddingRefused(f"text {place} has no tokens beside its prompt, and the prompt is not pooled")
        divisor = 1.0
        if files.pooling == "lasttoken":
            first = count - 1
        elif files.pooling == "cls":
            tokens = tokens[: first + 1]
        elif files.pooling == "weightedmean":
            divisor = (first + 1 + count) * (count - first) / 2
        else:
            divisor = count - first if files.pooling == "mean" else sqrt(count - first)
        weighted = files.pooling == "weightedmean"
        shared = min(common_length(tokens, self._head), first)  # the states from there on must be computed anyway
        return PooledText(tuple(tokens), Pooled(first, weighted, (), shared), divisor, count, truncated)

    def _cased(self, text: str) -> str:
        return text.lower() if self._files.lowercase else text

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _ids(self, place: int, text: Any) -> list[int]:
        ids: list[Any] = list(text) if is_list(text) else [None]
        for each in ids:
            whole = isinstance(each, Integral) and not isinstance(each, bool)
            if not whole or not 0 <= int(each) < self._vocab_size:
                raise EmbeddingRefused(
                    f"text {place} is no text, and no list of token ids below {self._vocab_size}: {text!r:.80}"
                )
        if self._asked is not None:
            raise EmbeddingRefused(
                f"text {place} is token ids, which are taken as they are: no prompt is put before it"
            )
        return [int(each) for each in ids]


def _special_tokens(tokenizer: SharedTokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the tokens that the tokenizer puts before a text, and those that it puts after it."""
    bare, whole = (tokenizer.encode("a", add_special_tokens=special) for special in (False, True))
    for begin in range(len(whole) - len(bare) + 1):
        if whole[begin : begin + len(bare)] == bare:
            return tuple(whole[:begin]), tuple(whole[begin + len(bare) :])
    raise EmbeddingRefused("the tokenizer writes a text in another way if it puts special tokens around it")
