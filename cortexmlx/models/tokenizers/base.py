"""The tokenizer that the engine talks to, when it is not mlx-lm's own wrapper.

`Tokenizer` has the part of mlx-lm's TokenizerWrapper interface that an engine needs, so both can be used alike (and
mlx-lm can wrap ours). It is the base of the tokenizers built from GGUF metadata and from sentencepiece models.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cortexmlx.errors import InvalidRequest
from cortexmlx.models.tokenizers.detokenize import Detokenizer
from cortexmlx.models.tokenizers.least_tokens import LeastTokens


@dataclass(frozen=True)
class SpecialTokens:
    """The tokens with a meaning of their own, and which of them an encoded prompt begins and ends with.

    `eos_ids` are all ids that end a generation: the end of text and, for chat models, the end of a turn.
    """

    bos_id: int | None = None
    eos_id: int | None = None
    unk_id: int | None = None
    pad_id: int | None = None
    eos_ids: frozenset[int] = frozenset()
    add_bos: bool = False
    add_eos: bool = False


def _without_lone_surrogates(text: str) -> str:
    """Broken UTF-8 read from a terminal or file arrives as lone surrogates; like all invalid text it becomes U+FFFD."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


class Tokenizer(ABC):
    """Text to token ids (plain ints) and back; special tokens that are written in the text are recognised. Any number
    of threads may use one at once.
    """

    def __init__(self, tokens: Sequence[str], special: SpecialTokens, chat_template: str | None) -> None:
        self._tokens = tokens
        self._special = special
        self._ids: dict[str, int] | None = None
        self.chat_template = chat_template
        self.has_chat_template = chat_template is not None
        self.eos_token_ids: set[int] = set(special.eos_ids)
        if special.eos_id is not None:
            self.eos_token_ids.add(special.eos_id)

    @abstractmethod
    def _encode_plain(self, text: str) -> list[int]:
        """Ids of `text` with nothing added around it."""

    @property
    @abstractmethod
    def least_tokens(self) -> LeastTokens:
        """How many tokens a text has at least."""

    @abstractmethod
    def decode(self, ids: int | Iterable[int], skip_special_tokens: bool = False) -> str:
        """Text of `ids`; incomplete UTF-8 becomes U+FFFD. Special tokens are written out unless skipped."""

    @property
    @abstractmethod
    def detokenizer(self) -> Detokenizer:
        """A fresh streaming detokenizer, one per request."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`, with the beginning- and end-of-text tokens that the model's settings ask for."""
        ids = self._encode_plain(_without_lone_surrogates(text))
        if add_special_tokens:
            if self._special.add_bos and self._special.bos_id is not None:
                ids.insert(0, self._special.bos_id)
            if self._special.add_eos and self._special.eos_id is not None:
                ids.append(self._special.eos_id)
        return ids

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        *,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str | list[int]:
        """The conversation as the model was trained to see it: text, or its ids (no further special tokens are added).

        Raises InvalidRequest when the model has no template or the template refuses the conversation.
        """
        if self.chat_template is None:
            raise InvalidRequest("this model has no chat template: give a plain text prompt instead of messages.")
        from cortexmlx.models.tokenizers.templates import render

        names = {"bos_token": self.bos_token, "eos_token": self.eos_token, "unk_token": self.unk_token}
        options = {name: token for name, token in names.items() if token is not None} | variables
        options |= {"add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message}
        text = render(self.chat_template, conversation, tools, options)
        return self.encode(text, add_special_tokens=False) if tokenize else text

    @property
    def bos_token_id(self) -> int | None:
        return self._special.bos_id

    @property
    def eos_token_id(self) -> int | None:
        return self._special.eos_id

    @property
    def unk_token_id(self) -> int | None:
        return self._special.unk_id

    @property
    def pad_token_id(self) -> int | None:
        return self._special.pad_id

    @property
    def bos_token(self) -> str | None:
        return self._token(self._special.bos_id)

    @property
    def eos_token(self) -> str | None:
        return self._token(self._special.eos_id)

    @property
    def unk_token(self) -> str | None:
        return self._token(self._special.unk_id)

    def _token(self, token_id: int | None) -> str | None:
        return None if token_id is None else self._tokens[token_id]

    @property
    def vocab_size(self) -> int:
        """Number of tokens that have a text."""
        return len(self._tokens)

    def __len__(self) -> int:
        return len(self._tokens)

    def get_vocab(self) -> dict[str, int]:
        """Id by token text, as written in the vocabulary."""
        if self._ids is None:
            self._ids = {token: index for index, token in enumerate(self._tokens)}
        return self._ids

    def convert_tokens_to_ids(self, token: str) -> int | None:
        return self.get_vocab().get(token, self._special.unk_id)

    def convert_ids_to_tokens(self, ids: int | Sequence[int]) -> str | list[str]:
        return self._tokens[ids] if isinstance(ids, int) else [self._tokens[index] for index in ids]
