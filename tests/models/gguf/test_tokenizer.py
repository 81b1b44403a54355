"""The tokenizer in a GGUF file's metadata: its type, its rule, its special tokens, and sentencepiece's as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

from cortexmlx.errors import ModelCorrupt, ModelUnsupported
from cortexmlx.models import load_model
from cortexmlx.models.gguf.file import read_gguf_header
from cortexmlx.models.gguf.tokenizer import build_tokenizer
from support.effort import examples
from support.gguf.models import byte_vocabulary, metadata, refused, tensors, write_model
from support.gguf.writer import Uint32, encode, write_gguf
from support.models.sentencepieces import TEXTS, judge


def test_unknown_pre_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    refused(tmp_path, ModelUnsupported, "'bloom'", header=metadata(tokenizer__ggml__pre="bloom"))


def test_unknown_tokenizer_type_is_refused_by_name(tmp_path: Path) -> None:
    refused(tmp_path, ModelUnsupported, "'rwkv'", header=metadata(tokenizer__ggml__model="rwkv"))


def test_files_without_a_word_rule_use_the_default_and_say_so(tmp_path: Path) -> None:
    loaded = load_model(write_model(tmp_path / "tiny.gguf", header=metadata(tokenizer__ggml__pre=None)))
    assert any("default rule" in note for note in loaded.notes)


@pytest.mark.parametrize(
    ("pre", "setting", "begins"),
    [("llama-bpe", None, True), ("llama-bpe", False, False), ("smollm", None, False), ("smollm", True, True)],
)
def test_prompts_begin_as_the_file_or_else_its_family_says(
    tmp_path: Path, pre: str, setting: bool | None, begins: bool
) -> None:
    header = metadata(tokenizer__ggml__pre=pre)
    if setting is not None:
        header["tokenizer.ggml.add_bos_token"] = setting
    tokenizer = load_model(write_model(tmp_path / "tiny.gguf", header=header)).tokenizer
    assert (tokenizer.encode("hello")[0] == tokenizer.bos_token_id) is begins


def test_every_token_that_ends_a_turn_ends_a_generation(tmp_path: Path) -> None:
    header = metadata()
    count = len(header["tokenizer.ggml.tokens"])
    header |= {"tokenizer.ggml.eos_token_id": Uint32(5), "tokenizer.ggml.eot_token_id": Uint32(6)}
    loaded = load_model(write_model(tmp_path / "tiny.gguf", header=header))
    assert loaded.tokenizer.eos_token_ids == {5, 6, count - 1}  # and <|im_end|>, a control token, by its name
    assert loaded.config["eos_token_id"] == [5, 6, count - 1]


def test_the_end_of_one_of_several_messages_is_not_the_end_of_the_answer(tmp_path: Path) -> None:
    for extra, ends in (("<|end|>", "<|call|>"), {"<|call|>"}), (("<|end|>", "<|return|>"), {"<|return|>"}):
        tokens, types = byte_vocabulary(extra)
        header = metadata() | {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
        header["tokenizer.ggml.eos_token_id"] = Uint32(tokens.index(max(ends)))
        loaded = load_model(write_model(tmp_path / "tiny.gguf", header=header)).tokenizer
        found = {tokens[index] for index in loaded.eos_token_ids}
        assert found == (ends if "<|return|>" in extra else {*ends, "<|end|>"})


def gguf_with(kind: str, path: Path, **changes: Any) -> Path:
    """A tiny model whose vocabulary is that of the trained sentencepiece model."""
    core = judge(kind)
    count = core.vocab_size()
    types = [
        2
        if core.is_unknown(i)
        else 3
        if core.is_control(i)
        else 6
        if core.is_byte(i)
        else 5
        if core.is_unused(i)
        else 1
        for i in range(count)
    ]
    header = metadata() | {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [core.id_to_piece(i) for i in range(count)],
        "tokenizer.ggml.scores": [core.get_score(i) for i in range(count)],
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": Uint32(core.bos_id()),
        "tokenizer.ggml.eos_token_id": Uint32(core.eos_id()),
        "tokenizer.ggml.unknown_token_id": Uint32(core.unk_id()),
    }
    header |= {key.replace("__", "."): value for key, value in changes.items()}
    stored = tensors("F32")
    import numpy as np

    stored["token_embd.weight"] = ("F32", (count, 64), encode(np.ones((count, 64)), "F32"))
    return write_gguf(path, header, stored)


@pytest.fixture(scope="module")
def from_gguf(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_model(gguf_with("llama", tmp_path_factory.mktemp("gguf") / "tiny.gguf")).tokenizer


@settings(max_examples=examples(200), deadline=None)
@given(text=TEXTS)
def test_a_gguf_vocabulary_tokenizes_as_the_model_that_it_came_from(from_gguf: Any, text: str) -> None:
    core = judge("llama")
    if "<s>" in text or "</s>" in text:
        return
    assert from_gguf.encode(text) == [core.bos_id(), *core.encode(text)]
    assert from_gguf.decode(core.encode(text)) == core.decode(core.encode(text))


def test_gguf_special_tokens_cut_the_text_and_the_space_comes_again(from_gguf: Any) -> None:
    core = judge("llama")
    found = from_gguf.encode("<s>Hello</s>world", add_special_tokens=False)
    assert found == [1, *core.encode("Hello"), 2, *core.encode("world")]
    assert from_gguf.eos_token_ids == {core.eos_id()}


def test_gguf_can_ask_for_no_leading_space(tmp_path: Path) -> None:
    tokenizer = load_model(
        gguf_with(
            "llama",
            tmp_path / "a.gguf",
            tokenizer__ggml__add_space_prefix=False,
            tokenizer__ggml__add_bos_token=False,
        )
    ).tokenizer
    core = judge("llama")
    assert next(core.id_to_piece(i) for i in tokenizer.encode("Hello"))[0] == "H"
    assert tokenizer.decode(tokenizer.encode(" Hello")) == " Hello"


def test_an_unknown_token_that_is_written_as_a_control_token_is_one_all_the_same(tmp_path: Path) -> None:
    core = judge("llama")
    types = [3 if i == core.unk_id() else 6 if core.is_byte(i) else 3 if core.is_control(i) else 1 for i in range(400)]
    types += [1] * (core.vocab_size() - len(types))
    tokenizer = load_model(gguf_with("llama", tmp_path / "a.gguf", tokenizer__ggml__token_type=types)).tokenizer
    assert tokenizer.encode("Hello world") == [core.bos_id(), *core.encode("Hello world")]
    assert tokenizer.unk_token_id == core.unk_id()


def marked(path: Path, architecture: str = "llama") -> Any:
    """A tokenizer with two tokens more, the first of which belongs to the text while the second does not."""
    core = judge("llama")
    count = core.vocab_size()
    header = read_gguf_header(gguf_with("llama", path)).metadata
    added = {
        "general.architecture": architecture,
        "tokenizer.ggml.tokens": [*header["tokenizer.ggml.tokens"], "<table>", "<|user|>"],
        "tokenizer.ggml.token_type": [*header["tokenizer.ggml.token_type"], 4, 3],
        "tokenizer.ggml.scores": [*header["tokenizer.ggml.scores"], 0.0, 0.0],
    }
    return build_tokenizer(read_gguf_header(gguf_with("llama", path, **added)), count + 2)[0]


def test_tokens_that_belong_to_the_text_are_not_skipped_with_the_special_ones(tmp_path: Path) -> None:
    tokenizer = marked(tmp_path / "a.gguf")
    ids = tokenizer.encode("<|user|>a<table>b", add_special_tokens=False)
    assert set(ids) > {tokenizer.vocab_size - 2, tokenizer.vocab_size - 1}
    assert tokenizer.decode(ids, skip_special_tokens=True).replace(" ", "") == "a<table>b"
    assert tokenizer.decode(ids).replace(" ", "") == "<|user|>a<table>b"


def test_control_tokens_of_phi_3_swallow_the_spaces_after_them(tmp_path: Path) -> None:
    tokenizer, core = marked(tmp_path / "a.gguf", "phi3"), judge("llama")
    table, user = core.vocab_size(), core.vocab_size() + 1
    spaced = "<|user|>\n  a b<s> c<table> d</s>\te"
    tight = [user, *core.encode("a b"), 1, *core.encode(" c"), table, *core.encode(" d"), 2, *core.encode("e")]
    assert tokenizer.encode(spaced, add_special_tokens=False) == tight
    assert tokenizer.token_lower_bound.compute(spaced) <= len(tight)
    other = marked(tmp_path / "b.gguf")
    assert len(other.encode(spaced, add_special_tokens=False)) > len(tight)


def test_gguf_scores_that_do_not_fit_are_corrupt(tmp_path: Path) -> None:
    with pytest.raises(ModelCorrupt, match="scores"):
        load_model(gguf_with("llama", tmp_path / "a.gguf", tokenizer__ggml__scores=[0.0]))


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("number", [-1, 7])
def test_token_types_that_are_none_are_corrupt(tmp_path: Path, kind: str, number: int) -> None:
    types = [number] * len(byte_vocabulary()[0])
    header = metadata(tokenizer__ggml__model=kind, tokenizer__ggml__token_type=types)
    header["tokenizer.ggml.scores"] = [0.0] * len(types)
    refused(tmp_path, ModelCorrupt, f"token types from {number} to {number}", header=header)


def test_a_gguf_vocabulary_with_a_piece_twice_is_corrupt(tmp_path: Path) -> None:
    core = judge("llama")
    tokens = [core.id_to_piece(i) for i in range(core.vocab_size())]
    tokens[-1] = tokens[-2]
    with pytest.raises(ModelCorrupt, match="sentencepiece"):
        load_model(gguf_with("llama", tmp_path / "a.gguf", tokenizer__ggml__tokens=tokens))
