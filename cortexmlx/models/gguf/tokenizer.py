"""The tokenizer in a GGUF file: vocabulary, token types, merges or scores, special ids and chat template."""

from __future__ import annotations

from cortexmlx.errors import ModelCorrupt, ModelUnsupported
from cortexmlx.models.gguf.file import GGUFHeader, GGUFMetadata
from cortexmlx.models.tokenizers.base import SpecialTokens, Tokenizer
from cortexmlx.models.tokenizers.bytelevel import ByteLevelTokenizer, find_pre_tokenizer
from cortexmlx.models.tokenizers.sentencepiece import PieceType, SentencePieceTokenizer, serialize_bpe_model
from cortexmlx.models.tokenizers.turn_ends import find_named_ends

# The control tokens of Phi 3 that keep the spaces after them. The file does not state this.
PHI3_SPACE_KEEPERS = frozenset(("<unk>", "<s>", "<|endoftext|>"))


def build_tokenizer(header: GGUFHeader, vocab_rows: int) -> tuple[Tokenizer, tuple[str, ...]]:
    """Return the tokenizer that `header` describes, and notes for the user.

    `vocab_rows` is the number of rows of the token embedding. The vocabulary may be shorter, but not longer.

    Raises ModelUnsupported for an unknown tokenizer type or pre-tokenizer, and ModelCorrupt for inconsistent metadata.
    """
    meta = GGUFMetadata(header)
    kind = meta.text("tokenizer.ggml.model")
    tokens = meta.items("tokenizer.ggml.tokens", str)
    if not tokens or len(tokens) > vocab_rows:
        raise ModelCorrupt(f"{meta.file} has {len(tokens)} tokens for {vocab_rows} embedding rows.")
    types = meta.items("tokenizer.ggml.token_type", int) or [int(PieceType.NORMAL)] * len(tokens)
    if len(types) != len(tokens):
        raise ModelCorrupt(f"{meta.file} has {len(tokens)} tokens and {len(types)} token types.")
    if not 0 <= min(types) <= max(types) <= max(PieceType):
        raise ModelCorrupt(f"{meta.file} has token types from {min(types)} to {max(types)}; 0 to {max(PieceType)} are.")
    template = meta.text("tokenizer.chat_template", "") or None
    if kind == "gpt2":
        return _build_byte_level(meta, tokens, types, template)
    if kind == "llama":
        return _build_sentencepiece(meta, tokens, types, template), ()
    raise ModelUnsupported(f"{meta.file} has a tokenizer of type {kind!r}; gpt2 (byte-level BPE) and llama are read.")


def _build_byte_level(
    meta: GGUFMetadata, tokens: list[str], types: list[int], template: str | None
) -> tuple[Tokenizer, tuple[str, ...]]:
    """Build a byte-level BPE tokenizer. Return it with notes for the user."""
    notes: tuple[str, ...] = ()
    pre = meta.text("tokenizer.ggml.pre", "")
    if not pre:
        pre = "default"
        notes = ("the file does not say how to cut text into words: the default rule is used, tokens may differ",)
    rule = find_pre_tokenizer(pre, meta.file)
    special = _read_special_tokens(meta, tokens, types, add_bos=rule.add_bos)
    merges = meta.items("tokenizer.ggml.merges", str)
    if not merges:
        raise ModelCorrupt(f"{meta.file} has no merges, without which each byte is a token. Convert it again.")
    return ByteLevelTokenizer(tokens, merges, types, rule, special, template), notes


def _build_sentencepiece(meta: GGUFMetadata, tokens: list[str], types: list[int], template: str | None) -> Tokenizer:
    """Build a BPE tokenizer that joins pieces by score. It adds the leading space again after a special token."""
    scores = meta.items("tokenizer.ggml.scores", float)
    if len(scores) != len(tokens):
        raise ModelCorrupt(f"{meta.file} has {len(tokens)} tokens and {len(scores)} scores.")
    special = _read_special_tokens(meta, tokens, types, add_bos=True)
    piece_types = list(types)
    if PieceType.UNKNOWN not in piece_types and special.unk_id is not None:
        piece_types[special.unk_id] = PieceType.UNKNOWN  # some converters write it as a control token
    model = serialize_bpe_model(tokens, scores, piece_types, meta.flag("tokenizer.ggml.add_space_prefix", True))
    added_types = (PieceType.CONTROL, PieceType.USER_DEFINED)
    added_tokens = {token: index for index, token in enumerate(tokens) if token and types[index] in added_types}
    user_defined = {token for token, index in added_tokens.items() if types[index] == PieceType.USER_DEFINED}
    controls = added_tokens.keys() - user_defined
    rstrip_tokens = (
        controls - PHI3_SPACE_KEEPERS | added_tokens.keys() & {"</s>"} if meta.architecture == "phi3" else ()
    )
    return SentencePieceTokenizer(
        model, special, template, added_tokens, visible_tokens=user_defined, rstrip_tokens=rstrip_tokens
    )


def _read_special_tokens(meta: GGUFMetadata, tokens: list[str], types: list[int], add_bos: bool) -> SpecialTokens:
    """Return the special tokens that the metadata names, and all tokens that end an answer."""

    def read_token_id(name: str) -> int | None:
        value = meta.integer(f"tokenizer.ggml.{name}_token_id")
        if value is None or value == 0xFFFFFFFF:
            return None
        if not 0 <= value < len(tokens):
            raise ModelCorrupt(f"{meta.file}: the {name} token id {value} is not one of {len(tokens)} tokens.")
        return value

    # A file names only one end id, and often the wrong one for chat.
    end_ids = find_named_ends({token: i for i, token in enumerate(tokens) if types[i] == PieceType.CONTROL})
    end_ids |= {end_id for name in ("eos", "eot", "eom") if (end_id := read_token_id(name)) is not None}
    return SpecialTokens(
        bos_id=read_token_id("bos"),
        eos_id=read_token_id("eos"),
        unk_id=read_token_id("unknown"),
        pad_id=read_token_id("padding"),
        eos_ids=frozenset(end_ids),
        add_bos=meta.flag("tokenizer.ggml.add_bos_token", add_bos),
        add_eos=meta.flag("tokenizer.ggml.add_eos_token", False),
    )
