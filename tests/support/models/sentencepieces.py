"""sentencepiece models of every kind, trained on a few lines, and sentencepiece itself as the judge of them."""

from __future__ import annotations

import io
from functools import lru_cache
from typing import Any

import sentencepiece as spm
from hypothesis import strategies as st

CORPUS = [
    "Hello world, this is a test of the tokenizer.",
    "The quick brown fox jumps over the lazy dog 12345 times.",
    "naïve café über straße, résumé",
    "今日は 世界 привет мир",
    "  leading spaces and   multiple  spaces ",
    "def f(x):\n\treturn x + 1",
] * 20

KINDS: dict[str, dict[str, Any]] = {
    "unigram": {"model_type": "unigram", "vocab_size": 150},
    "unigram with bytes": {"model_type": "unigram", "vocab_size": 400, "byte_fallback": True},
    "bpe": {"model_type": "bpe", "vocab_size": 200},
    "llama": {
        "model_type": "bpe",
        "vocab_size": 450,
        "byte_fallback": True,
        "split_digits": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "allow_whitespace_only_pieces": True,
    },
    "user symbols": {
        "model_type": "bpe",
        "vocab_size": 450,
        "byte_fallback": True,
        "user_defined_symbols": ["<turn>", "\n\n", "▁▁▁"],
        "remove_extra_whitespaces": False,
        "normalization_rule_name": "identity",
    },
    "no dummy prefix": {
        "model_type": "unigram",
        "vocab_size": 400,
        "byte_fallback": True,
        "add_dummy_prefix": False,
        "remove_extra_whitespaces": False,
    },
}

ALPHABET = st.sampled_from([*"Helo wrdthis 12éß世界мир\n\t.▁<>", "<turn>", "\n\n", "   ", "🙂", "\u0301"])
TEXTS = st.one_of(st.text(max_size=20), st.lists(ALPHABET, max_size=20).map("".join))


@lru_cache
def trained(kind: str) -> bytes:
    out = io.BytesIO()
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS), model_writer=out, minloglevel=2, hard_vocab_limit=False, **KINDS[kind]
    )
    return out.getvalue()


@lru_cache
def judge(kind: str) -> spm.SentencePieceProcessor:
    return spm.SentencePieceProcessor(model_proto=trained(kind))
