"""sentencepiece's model format as it is written here, read by sentencepiece itself."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from sentencepiece import SentencePieceProcessor

from cortexmlx.models.tokenizers.sentencepiece import (
    PieceType,
    keeps_all_bytes,
    read_space_flags,
    remove_dummy_prefix,
    serialize_bpe_model,
)
from support.models.sentencepieces import KINDS, judge, trained

MEANT = ["<unk>", "<s>", "<turn>", *(f"<0x{byte:02X}>" for byte in range(256))]
TYPES = [PieceType.UNKNOWN, PieceType.CONTROL, PieceType.USER_DEFINED, *[PieceType.BYTE] * 256]
NORMAL = st.dictionaries(
    st.text(st.sampled_from("abcé世▁🙂"), min_size=1, max_size=200), st.floats(-1e6, 0, width=32), max_size=20
)


@given(NORMAL)
@example({"a" * 127: -1.0, "a" * 128: -2.0, "a" * 300: -3.0})
def test_pieces_come_back_with_their_texts_scores_and_types(normal: dict[str, float]) -> None:
    pieces, scores = [*MEANT, *normal], [*[0.0] * len(MEANT), *normal.values()]
    types = [*TYPES, *[PieceType.NORMAL] * len(normal)]
    core = SentencePieceProcessor(model_proto=serialize_bpe_model(pieces, scores, types, add_dummy_prefix=True))
    ids = range(len(pieces))
    assert [core.id_to_piece(i) for i in ids] == pieces and core.vocab_size() == len(pieces)
    assert [core.get_score(i) for i in ids] == scores
    assert [i for i in ids if core.is_unknown(i)] == [0] and [i for i in ids if core.is_control(i)] == [1]
    assert [i for i in ids if core.is_byte(i)] == [*range(3, 259)]


@pytest.mark.parametrize("add_dummy_prefix", [True, False])
def test_a_text_begins_with_a_space_if_that_is_asked_for(add_dummy_prefix: bool) -> None:
    pieces, types = [*MEANT, "a", "▁", "▁a"], [*TYPES, *[PieceType.NORMAL] * 3]
    model = serialize_bpe_model(pieces, [0.0] * len(pieces), types, add_dummy_prefix)
    found = SentencePieceProcessor(model_proto=model).encode("a  a", out_type=str)
    assert found == (["▁a", "▁", "▁a"] if add_dummy_prefix else ["a", "▁", "▁a"])
    assert read_space_flags(model) == (add_dummy_prefix, False) and keeps_all_bytes(model)


@pytest.mark.parametrize("kind", KINDS)
def test_the_settings_of_a_model_that_sentencepiece_trained_are_read(kind: str) -> None:
    settings = KINDS[kind]
    flags = settings.get("add_dummy_prefix", True), settings.get("remove_extra_whitespaces", True)
    assert read_space_flags(trained(kind)) == flags
    plain = settings.get("normalization_rule_name") == "identity"
    assert keeps_all_bytes(trained(kind)) is (plain and settings.get("byte_fallback", False))


@pytest.mark.parametrize("kind", ["llama", "user symbols", "unigram with bytes"])
def test_the_leading_space_can_be_taken_out_of_a_model(kind: str) -> None:
    model = remove_dummy_prefix(trained(kind))
    before, after = judge(kind), SentencePieceProcessor(model_proto=model)
    assert "".join(before.encode("Hello world", out_type=str)) == "▁Hello▁world"
    assert "".join(after.encode("Hello world", out_type=str)) == "Hello▁world"
    assert read_space_flags(model) == (False, read_space_flags(trained(kind))[1])
