"""Byte-level BPE (the "gpt2" tokenizer type) from GGUF metadata, on the tokenizers library.

A GGUF file names its pre-tokenizer by a short name. This is the rule that cuts text into words before merging. A wrong
rule gives wrong tokens without an error, so an unknown name is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from cortexmlx.errors import InvalidRequest, ModelCorrupt, ModelUnsupported
from cortexmlx.models.messages import one_line
from cortexmlx.models.tokenizers.alphabet import byte_level_token_bytes
from cortexmlx.models.tokenizers.base import SpecialTokens, Tokenizer
from cortexmlx.models.tokenizers.detokenize import ByteDetokenizer, StreamingDetokenizer
from cortexmlx.models.tokenizers.least_tokens import TokenLowerBound, bound_for_core
from cortexmlx.models.tokenizers.sentencepiece import PieceType

if TYPE_CHECKING:
    import tokenizers

_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_WORD = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"


@dataclass(frozen=True)
class PreTokenizerRule:
    """How a byte-level tokenizer normalizes text and cuts it into words, before merges join the bytes of each word."""

    splits: tuple[str, ...]
    """Patterns that are applied in order. Each match becomes a piece of its own."""
    ignore_merges: bool = False
    """Whether a word that is in the vocabulary as a whole is taken without merging."""
    nfc: bool = False
    """Whether the text is composed (NFC) first."""
    add_bos: bool = False
    """Whether prompts begin with the beginning-of-text token if the file does not say."""


_GPT2 = PreTokenizerRule((_GPT2_WORDS,))
_SINGLE_DIGITS = PreTokenizerRule((r"\p{N}", _GPT2_WORDS))
_LLAMA3_WORDS = rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}|{_SYMBOLS}|{_SPACES}"
_LLAMA3 = PreTokenizerRule((_LLAMA3_WORDS,), ignore_merges=True, add_bos=True)
_QWEN2_WORDS = rf"{_CONTRACTION}|{_WORD}|\p{{N}}|{_SYMBOLS}|{_SPACES}"
_O200K_WORDS = "|".join(
    (
        *(rf"{word}{_CONTRACTION}?" for word in _CASED_WORD.split("|")),
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        _SPACES,
    )
)
_TEKKEN_WORDS = rf"{_CASED_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"

PRE_TOKENIZERS: dict[str, PreTokenizerRule] = {
    "default": PreTokenizerRule(
        (r"[\p{P}\$\+<=>\^~\|]+", _GPT2_WORDS.removesuffix(r"|\s+"), r"\p{N}+", r"[0-9][0-9][0-9]")
    ),
    "gpt-2": _GPT2,
    "smollm": _SINGLE_DIGITS,
    "starcoder": _SINGLE_DIGITS,
    "refact": _SINGLE_DIGITS,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "smaug-bpe": PreTokenizerRule((_LLAMA3_WORDS,)),
    "dbrx": PreTokenizerRule((_LLAMA3_WORDS,)),
    "gpt-4o": PreTokenizerRule((_O200K_WORDS,)),
    "qwen2": PreTokenizerRule((_QWEN2_WORDS,), nfc=True),
    "deepseek-r1-qwen": PreTokenizerRule((_QWEN2_WORDS,)),
    "tekken": PreTokenizerRule((_TEKKEN_WORDS,), ignore_merges=True, add_bos=True),
}


def find_pre_tokenizer(name: str, file: str) -> PreTokenizerRule:
    """Return the pre-tokenizer with the name that a GGUF file gives. Raises ModelUnsupported for an unknown name."""
    if name not in PRE_TOKENIZERS:
        known_rules = ", ".join(sorted(PRE_TOKENIZERS))
        raise ModelUnsupported(
            f"{file} cuts text into words by the rule {name!r}, which is not known here (known: {known_rules})."
        )
    return PRE_TOKENIZERS[name]


def encode_without_gil(core: tokenizers.Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    """Encode `text` with the tokenizers library, without holding the GIL as its `encode` does. Return the ids.

    Raises InvalidRequest if the library panics, which no `except Exception` would catch. It panics if a word pattern
    backtracks too often in a text.
    """
    try:
        ids: list[int] = core.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise InvalidRequest("the model's tokenizer gives up on this text: shorten it, or cut it.") from error
    return ids


class ByteLevelTokenizer(Tokenizer):
    """A byte-level BPE tokenizer made of a vocabulary, merges in order of rank, token types and a pre-tokenizer.

    Raises ModelCorrupt if merges and vocabulary do not fit.
    """

    def __init__(
        self,
        tokens: Sequence[str],
        merges: Sequence[str],
        types: Sequence[int],
        rule: PreTokenizerRule,
        special: SpecialTokens,
        chat_template: str | None = None,
    ) -> None:
        super().__init__(tokens, special, chat_template)
        self._core = _build_core(tokens, merges, types, rule)
        self._control = frozenset(index for index, kind in enumerate(types) if kind == PieceType.CONTROL)
        self._pieces = [byte_level_token_bytes(token) for token in tokens]

    def _encode_plain(self, text: str) -> list[int]:
        return encode_without_gil(self._core, text, add_special_tokens=False)

    @cached_property
    def token_lower_bound(self) -> TokenLowerBound:
        """A lower bound for the number of tokens of any text, computed without tokenizing."""
        return bound_for_core(self._core)

    def decode(self, ids: int | Iterable[int], skip_special_tokens: bool = False) -> str:
        token_ids = [ids] if isinstance(ids, int) else ids
        pieces = self._pieces
        return b"".join(
            pieces[token]
            for token in token_ids
            if 0 <= token < len(pieces) and not (skip_special_tokens and token in self._control)
        ).decode("utf-8", "replace")

    @property
    def special_ids(self) -> frozenset[int]:
        return self._control

    @property
    def detokenizer(self) -> StreamingDetokenizer:
        return ByteDetokenizer(self._pieces)


def _build_core(
    tokens: Sequence[str], merges: Sequence[str], types: Sequence[int], rule: PreTokenizerRule
) -> tokenizers.Tokenizer:
    """Build the tokenizers library's object for a vocabulary, its merges and a pre-tokenizer."""
    from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

    pairs = []
    for merge in merges:
        left, _, right = merge.partition(" ")
        pairs.append((left, right))
    vocab = {token: index for index, token in enumerate(tokens)}
    try:
        core = Tokenizer(models.BPE(vocab=vocab, merges=pairs, ignore_merges=rule.ignore_merges))
    except Exception as error:  # the library raises plain Exception
        raise ModelCorrupt(f"the tokenizer in the GGUF metadata is inconsistent: {one_line(error)}") from error
    if rule.nfc:
        core.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in rule.splits]
    core.pre_tokenizer = pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(False, use_regex=False)])
    core.add_special_tokens(
        [AddedToken(t, normalized=False) for t, k in zip(tokens, types, strict=True) if k == PieceType.CONTROL]
    )
    core.add_tokens(
        [AddedToken(t, normalized=False) for t, k in zip(tokens, types, strict=True) if k == PieceType.USER_DEFINED]
    )
    return core
