"""The tokenizer inside a GGUF file: vocabulary, token types, merges or scores, special ids and chat template."""

from __future__ import annotations

from cortexmlx.errors import ModelCorrupt, ModelUnsupported
from cortexmlx.models.bytelevel import CONTROL, NORMAL, ByteLevelTokenizer
from cortexmlx.models.gguf_config import Metadata
from cortexmlx.models.gguf_file import GGUFHeader
from cortexmlx.models.tokenizer import SpecialTokens, Tokenizer

# Control tokens that end a turn or a text in some model family. Files name one end id only, and often the wrong one for
# chat, so those of these names that the vocabulary has as control tokens end a generation too.
END_NAMES = frozenset(
    ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "<|end_of_text|>")
)


def build_tokenizer(header: GGUFHeader, vocab_rows: int) -> tuple[Tokenizer, tuple[str, ...]]:
    """The tokenizer that `header` describes, and notes for the user.

    `vocab_rows` is the number of rows of the token embedding; the vocabulary may be shorter, never longer.
    Raises ModelUnsupported for an unknown tokenizer type or pre-tokenizer, ModelCorrupt for inconsistent metadata.
    """
    meta = Metadata(header)
    kind = meta.text("tokenizer.ggml.model")
    tokens = meta.items("tokenizer.ggml.tokens", str)
    if not tokens or len(tokens) > vocab_rows:
        raise ModelCorrupt(f"{meta.file} has {len(tokens)} tokens for {vocab_rows} embedding rows.")
    types = meta.items("tokenizer.ggml.token_type", int) or [NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise ModelCorrupt(f"{meta.file} has {len(tokens)} tokens and {len(types)} token types.")
    template = meta.text("tokenizer.chat_template", "") or None
    if kind == "gpt2":
        notes: tuple[str, ...] = ()
        pre = meta.text("tokenizer.ggml.pre", "")
        if not pre:
            pre = "default"
            notes = ("the file does not say how it cuts text into words; the usual rule is used",)
        merges = meta.items("tokenizer.ggml.merges", str)
        special = _special_tokens(meta, tokens, types, add_bos=False)
        return ByteLevelTokenizer(tokens, merges, types, pre, special, template), notes
    raise ModelUnsupported(f"{meta.file} has a tokenizer of type {kind!r}; gpt2 (byte-level BPE) and llama are read.")


def _special_tokens(meta: Metadata, tokens: list[str], types: list[int], add_bos: bool) -> SpecialTokens:
    def token_id(name: str) -> int | None:
        value = meta.integer(f"tokenizer.ggml.{name}_token_id")
        if value is None or value == 0xFFFFFFFF:
            return None
        if not 0 <= value < len(tokens):
            raise ModelCorrupt(f"{meta.file}: the {name} token id {value} is not one of {len(tokens)} tokens.")
        return value

    ends = {index for index, token in enumerate(tokens) if types[index] == CONTROL and token in END_NAMES}
    ends |= {found for name in ("eos", "eot", "eom") if (found := token_id(name)) is not None}
    return SpecialTokens(
        bos_id=token_id("bos"),
        eos_id=token_id("eos"),
        unk_id=token_id("unknown"),
        pad_id=token_id("padding"),
        eos_ids=frozenset(ends),
        add_bos=meta.flag("tokenizer.ggml.add_bos_token", add_bos),
        add_eos=meta.flag("tokenizer.ggml.add_eos_token", False),
    )
