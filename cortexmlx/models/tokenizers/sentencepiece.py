"""Tokenizing with sentencepiece itself, for models with a `tokenizer.model` or a GGUF vocabulary of that type.

So plain text gets exactly sentencepiece's tokens. sentencepiece does not recognise special tokens that are written in
the text, and a rendered chat template is full of them. So the text is cut at these first.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING

from cortexmlx.errors import ModelCorrupt
from cortexmlx.models.messages import one_line
from cortexmlx.models.tokenizers.base import SpecialTokens, Tokenizer
from cortexmlx.models.tokenizers.detokenize import Detokenizer, LeadingSpace, Piece, PieceDetokenizer
from cortexmlx.models.tokenizers.least_tokens import LeastTokens, least_by_characters, no_bound
from cortexmlx.models.tokenizers.sentencepiece_proto import keeps_bytes, leading_space_flags, without_dummy_prefix

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor

SPACE = "\u2581"
_SPACES = re.compile(r"\s*")


class SentencePieceTokenizer(Tokenizer):
    """A sentencepiece model (serialized, as in `tokenizer.model`) with special tokens around it. Raises ModelCorrupt if
    sentencepiece refuses the model.

    - `added`: texts that stand for one id wherever they occur. Ids may be beyond the model's own pieces. Skipping
      special tokens skips these and control pieces, except those in `shown`.
    - `prefix_after_added`: text after such a token gets the model's leading space again, like text at the beginning.
    - `rstrip_tokens`: the spaces after these tokens are dropped.
    """

    def __init__(
        self,
        model: bytes,
        special: SpecialTokens,
        chat_template: str | None = None,
        added: Mapping[str, int] | None = None,
        prefix_after_added: bool = True,
        shown: Collection[str] = (),
        rstrip_tokens: Collection[str] = (),
    ) -> None:
        from sentencepiece import SentencePieceProcessor

        added = dict(added or {})
        try:
            self._first = SentencePieceProcessor(model_proto=model)
            self._later = (
                self._first if prefix_after_added else SentencePieceProcessor(model_proto=without_dummy_prefix(model))
            )
        except Exception as error:  # the library raises RuntimeError and others, all from parsing
            raise ModelCorrupt(f"sentencepiece cannot read the tokenizer: {one_line(error)}") from error
        core = self._first
        count = max([core.vocab_size(), *(index + 1 for index in added.values())])
        tokens = [core.id_to_piece(index) if index < core.vocab_size() else "" for index in range(count)]
        for text, index in added.items():
            tokens[index] = text
        super().__init__(tokens, special, chat_template)
        self._added = added
        self._hidden = added.keys() - set(shown)
        self._rstrip_tokens = frozenset(rstrip_tokens)
        self._cut = re.compile("|".join(map(re.escape, sorted(added, key=len, reverse=True)))) if added else None
        self._pieces = [self._piece(index) for index in range(count)]
        dummy_prefix, no_extra_spaces = leading_space_flags(model)
        self._leading = LeadingSpace.DROP_ONE if dummy_prefix else LeadingSpace.KEEP
        if no_extra_spaces:
            self._leading = LeadingSpace.DROP_ALL
        self._keeps_bytes, self._keeps_spaces = keeps_bytes(model), not (no_extra_spaces or rstrip_tokens)

    def _piece(self, index: int) -> Piece:
        core = self._first
        text = self._tokens[index]
        if index >= core.vocab_size() or text in self._hidden or core.is_control(index):
            return Piece(text, special=True)
        if core.is_byte(index):
            return Piece("", byte=int(text[3:5], 16))
        if core.is_unknown(index):
            return Piece(core.decode([index]))
        return Piece(text.replace(SPACE, " "), marked=text.startswith(SPACE))

    def _encode_plain(self, text: str) -> list[int]:
        if self._cut is None:
            return self._encode_run(self._first, text)
        ids: list[int] = []
        done = 0
        for match in self._cut.finditer(text):
            ids += self._encode_run(self._later if done else self._first, text[done : match.start()])
            ids.append(self._added[match[0]])
            spaces = _SPACES.match(text, match.end()) if match[0] in self._rstrip_tokens else None
            done = spaces.end() if spaces else match.end()
        return ids + self._encode_run(self._later if done else self._first, text[done:])

    @staticmethod
    def _encode_run(core: SentencePieceProcessor, text: str) -> list[int]:
        return list(core.encode(text)) if text else []

    @cached_property
    def least_tokens(self) -> LeastTokens:
        return least_by_characters(self._tokens, self._keeps_spaces) if self._keeps_bytes else no_bound()

    def decode(self, ids: int | Iterable[int], skip_special_tokens: bool = False) -> str:
        detokenizer = PieceDetokenizer(self._pieces, self._leading)
        for token in [ids] if isinstance(ids, int) else ids:
            special = 0 <= token < len(self._pieces) and self._pieces[token].special
            if not (special and skip_special_tokens):
                detokenizer.add_token(token)
        detokenizer.finalize()
        return detokenizer.text

    @cached_property
    def special_ids(self) -> frozenset[int]:
        return frozenset(index for index, piece in enumerate(self._pieces) if piece.special)

    @property
    def detokenizer(self) -> Detokenizer:
        return PieceDetokenizer(self._pieces, self._leading)
