"""Folders with `tokenizer.model`, and GGUF vocabularies of that type, tokenize exactly as sentencepiece itself does."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cortexmlx.errors import ModelCorrupt
from cortexmlx.models import load_model
from cortexmlx.models.tokenizers.base import SpecialTokens
from cortexmlx.models.tokenizers.sentencepiece import SentencePieceTokenizer
from cortexmlx.models.tokenizers.sentencepiece_folder import load_sentencepiece_folder
from support.gguf_models import metadata, tensors
from support.gguf_writer import Uint32, encode, write_gguf
from support.sentencepieces import KINDS, judge, trained

ALPHABET = st.sampled_from([*"Helo wrdthis 12éß世界мир\n\t.▁<>", "<turn>", "\n\n", "   ", "🙂", "\u0301"])
TEXTS = st.one_of(st.text(max_size=20), st.lists(ALPHABET, max_size=20).map("".join))


@lru_cache
def ours(kind: str) -> SentencePieceTokenizer:
    return SentencePieceTokenizer(trained(kind), SpecialTokens())


def streamed(tokenizer: SentencePieceTokenizer, ids: list[int]) -> str:
    detokenizer = tokenizer.detokenizer
    seen = ""
    for token in ids:
        detokenizer.add_token(token)
        seen += detokenizer.last_segment
    detokenizer.finalize()
    seen += detokenizer.last_segment
    assert detokenizer.text == seen
    return seen


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150, deadline=None)
@given(text=TEXTS)
def test_text_gets_the_tokens_of_sentencepiece_and_decodes_as_there(kind: str, text: str) -> None:
    wanted = judge(kind).encode(text)
    assert ours(kind).encode(text) == wanted
    assert ours(kind).decode(wanted) == judge(kind).decode(wanted)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_any_ids_decode_and_stream_as_sentencepiece_decodes_them(kind: str, data: st.DataObject) -> None:
    core = judge(kind)
    marked = [i for i in range(core.vocab_size()) if core.id_to_piece(i).startswith("▁")]
    others = [i for i in range(core.vocab_size()) if not core.is_control(i)]
    ids = data.draw(st.lists(st.one_of(st.sampled_from(others), st.sampled_from(marked)), max_size=12))
    wanted = core.decode(ids)
    assert ours(kind).decode(ids) == wanted
    assert streamed(ours(kind), ids) == wanted


def test_control_tokens_are_written_out_or_skipped() -> None:
    tokenizer, core = ours("llama"), judge("llama")
    ids = [core.bos_id(), *core.encode("Hello world"), core.eos_id()]
    assert tokenizer.decode(ids, skip_special_tokens=True) == core.decode(ids) == "Hello world"
    assert tokenizer.decode(ids) == "<s>Hello world</s>"
    assert streamed(tokenizer, ids) == "<s>Hello world</s>"


def test_half_a_character_is_never_shown() -> None:
    tokenizer, core = ours("llama"), judge("llama")
    detokenizer = tokenizer.detokenizer
    shown = []
    for token in [core.piece_to_id(f"<0x{byte:02X}>") for byte in "🙂".encode()] + core.encode("a"):
        detokenizer.add_token(token)
        shown.append(detokenizer.last_segment)
    assert shown[:4] == ["", "", "", "🙂"]


def folder(path: Path, kind: str, **config: Any) -> Path:
    path.mkdir(exist_ok=True)
    (path / "tokenizer.model").write_bytes(trained(kind))
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


@settings(max_examples=100, deadline=None)
@given(text=TEXTS)
def test_a_folder_with_settings_tokenizes_plain_text_as_sentencepiece(
    text: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "plain"
    tokenizer = load_sentencepiece_folder(folder(path, "llama", bos_token="<s>", eos_token="</s>"), {2})
    core = judge("llama")
    if "<s>" not in text and "</s>" not in text:
        assert tokenizer.encode(text) == [core.bos_id(), *core.encode(text)]
        assert tokenizer.encode(text, add_special_tokens=False) == core.encode(text)


def test_special_tokens_in_the_text_are_recognised_and_legacy_adds_the_space_again(tmp_path: Path) -> None:
    core = judge("llama")
    named = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "add_bos_token": False}
    legacy = load_sentencepiece_folder(folder(tmp_path, "llama", legacy=True, **named), set())
    assert legacy.encode("<s>Hello</s> world") == [1, *core.encode("Hello"), 2, *core.encode(" world")]
    modern = load_sentencepiece_folder(folder(tmp_path, "llama", legacy=False, **named), set())
    found = modern.encode("<s>Hello")
    assert found[0] == 1 and "".join(core.id_to_piece(found[1:])) == "Hello"
    assert "".join(core.encode("Hello", out_type=str)) == "▁Hello"
    assert modern.encode("Hello") == core.encode("Hello")


def test_added_tokens_beyond_the_model_have_ids_and_text(tmp_path: Path) -> None:
    core = judge("llama")
    first = core.vocab_size()
    path = folder(
        tmp_path,
        "llama",
        add_bos_token=False,
        eos_token="<|end|>",
        added_tokens_decoder={str(first): {"content": "<|user|>"}, str(first + 1): {"content": "<|end|>"}},
    )
    tokenizer = load_sentencepiece_folder(path, {2})
    assert tokenizer.encode("<|user|>Hello<|end|>") == [first, *core.encode("Hello"), first + 1]
    assert tokenizer.decode([first, *core.encode("Hello"), first + 1]) == "<|user|>Hello<|end|>"
    assert tokenizer.eos_token_ids == {2, first + 1} and tokenizer.eos_token_id == first + 1
    assert tokenizer.vocab_size == first + 2


@pytest.mark.parametrize("where", ["config", "list", "jinja"])
def test_the_chat_template_is_found_wherever_it_is(tmp_path: Path, where: str) -> None:
    template = "{{ bos_token }}{% for m in messages %}[{{ m['content'] }}]{% endfor %}"
    given = {"config": template, "list": [{"name": "default", "template": template}], "jinja": None}[where]
    path = folder(tmp_path, "llama", bos_token="<s>", chat_template=given)
    if where == "jinja":
        (path / "chat_template.jinja").write_text(template)
    tokenizer = load_sentencepiece_folder(path, set())
    assert tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}], tokenize=False) == "<s>[Hello]"


@pytest.mark.parametrize("damage", ["tokenizer.model", "tokenizer_config.json", "added_tokens.json"])
def test_damaged_files_are_named(tmp_path: Path, damage: str) -> None:
    path = folder(tmp_path, "llama")
    (path / damage).write_bytes(b"\xff{broken")
    with pytest.raises(ModelCorrupt, match=damage) as caught:
        load_sentencepiece_folder(path, set())
    assert "\n" not in str(caught.value)


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


@settings(max_examples=200, deadline=None)
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


def test_gguf_scores_that_do_not_fit_are_corrupt(tmp_path: Path) -> None:
    with pytest.raises(ModelCorrupt, match="scores"):
        load_model(gguf_with("llama", tmp_path / "a.gguf", tokenizer__ggml__scores=[0.0]))


def test_a_gguf_vocabulary_with_a_piece_twice_is_corrupt(tmp_path: Path) -> None:
    core = judge("llama")
    tokens = [core.id_to_piece(i) for i in range(core.vocab_size())]
    tokens[-1] = tokens[-2]
    with pytest.raises(ModelCorrupt, match="sentencepiece"):
        load_model(gguf_with("llama", tmp_path / "a.gguf", tokenizer__ggml__tokens=tokens))
