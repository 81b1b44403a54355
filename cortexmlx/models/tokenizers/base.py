"""The base class of our own tokenizers: those made from GGUF metadata, and from sentencepiece models.

`Tokenizer` has the part of mlx-lm's TokenizerWrapper interface that an engine needs. So an engine uses both alike, and
mlx-lm can wrap ours.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cortexmlx.errors import InvalidRequest
from cortexmlx.models.tokenizers.detokenize import StreamingDetokenizer
from cortexmlx.models.tokenizers.least_tokens import TokenLowerBound


@dataclass(frozen=True)
class SpecialTokens:
    """The ids of a tokenizer's special tokens, and whether prompts begin and end with them."""

    bos_id: int | None = None
    eos_id: int | None = None
    unk_id: int | None = None
    pad_id: int | None = None
    eos_ids: frozenset[int] = frozenset()
    """All ids that end a generation: the end of text and, for chat models, the end of a turn."""
    add_bos: bool = False
    """Whether an encoded prompt begins with `bos_id`."""
    add_eos: bool = False
    """Whether an encoded prompt ends with `eos_id`."""


def _replace_lone_surrogates(text: str) -> str:
    """Replace lone surrogates (broken UTF-8 from a terminal or a file) by U+FFFD, as for all invalid text."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


class Tokenizer(ABC):
    """The base class of our tokenizers: encodes text to token ids (plain ints) and decodes ids. It recognises special
    tokens in the text. Any number of threads may use one at once.
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
        """Return the ids of `text`, without a begin or end token around it."""

    @property
    @abstractmethod
    def token_lower_bound(self) -> TokenLowerBound:
        """A lower bound for the number of tokens of any text, computed without tokenizing."""

    @abstractmethod
    def decode(self, ids: int | Iterable[int], skip_special_tokens: bool = False) -> str:
        """Return the text of `ids`. Incomplete UTF-8 becomes U+FFFD. Special tokens are written unless skipped."""

    @property
    @abstractmethod
    def special_ids(self) -> frozenset[int]:
        """The ids of tokens that stand for no text, such as the end of a turn. `decode` can skip them."""

    @property
    @abstractmethod
    def detokenizer(self) -> StreamingDetokenizer:
        """A new streaming detokenizer; each request needs its own."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of `text`, with the begin and end tokens that the model's settings ask for."""
        ids = self._encode_plain(_replace_lone_surrogates(text))
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
        """Render the conversation by the model's chat template: as text, or as ids without further special tokens.

        Raises InvalidRequest if the model has no template, or if the template refuses the conversation.
        """
        if self.chat_template is None:
            raise InvalidRequest("this model has no chat template: give a plain text prompt instead of messages.")
        from cortexmlx.models.tokenizers.templates import render_template

        names = {"bos_token": self.bos_token, "eos_token": self.eos_token, "unk_token": self.unk_token}
        options = {name: token for name, token in names.items() if token is not None} | variables
        options |= {"add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message}
        text = render_template(self.chat_template, conversation, tools, options)
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
        return self._token_text(self._special.bos_id)

    @property
    def eos_token(self) -> str | None:
        return self._token_text(self._special.eos_id)

    @property
    def unk_token(self) -> str | None:
        return self._token_text(self._special.unk_id)

    def _token_text(self, token_id: int | None) -> str | None:
        """Return the text of a token id; None for None."""
        return None if token_id is None else self._tokens[token_id]

    @property
    def vocab_size(self) -> int:
        """The number of tokens that have a text."""
        return len(self._tokens)

    def __len__(self) -> int:
        return len(self._tokens)

    def get_vocab(self) -> dict[str, int]:
        """Return the id of each token by its text, as the vocabulary writes it."""
        if self._ids is None:
            self._ids = {token: index for index, token in enumerate(self._tokens)}
        return self._ids

    def convert_tokens_to_ids(self, token: str) -> int | None:
        """Return the id of a token's text, or the unknown token's id. The name is that of transformers."""
        return self.get_vocab().get(token, self._special.unk_id)

    def convert_ids_to_tokens(self, ids: int | Sequence[int]) -> str | list[str]:
        """Return the text of one id, or of several, as the vocabulary writes it. The name is that of transformers."""
        return self._tokens[ids] if isinstance(ids, int) else [self._tokens[index] for index in ids]
