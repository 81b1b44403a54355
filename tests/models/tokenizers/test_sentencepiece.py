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
from cortexmlx.models.tokenizers.base import SpecialTokens
from cortexmlx.models.tokenizers.folder import load_sentencepiece_folder
from cortexmlx.models.tokenizers.sentencepiece import SentencePieceTokenizer
from support.effort import THOROUGH, examples
from support.models.sentencepieces import KINDS, TEXTS, judge, trained
from support.streaming import streamed


@lru_cache
def ours(kind: str) -> SentencePieceTokenizer:
    return SentencePieceTokenizer(trained(kind), SpecialTokens())


@settings(max_examples=900 if THOROUGH else 60, deadline=None)
@given(st.sampled_from(sorted(KINDS)), TEXTS)
def test_text_gets_the_tokens_of_sentencepiece_and_decodes_as_there(kind: str, text: str) -> None:
    wanted = judge(kind).encode(text)
    assert ours(kind).encode(text) == wanted
    assert ours(kind).decode(wanted) == judge(kind).decode(wanted)


@lru_cache
def ids_of(kind: str) -> st.SearchStrategy[list[int]]:
    """Ids of which many begin a word."""
    core = judge(kind)
    marked = [i for i in range(core.vocab_size()) if core.id_to_piece(i).startswith("▁")]
    others = [i for i in range(core.vocab_size()) if not core.is_control(i)]
    return st.lists(st.one_of(st.sampled_from(others), st.sampled_from(marked)), max_size=12)


@settings(max_examples=1800 if THOROUGH else 90, deadline=None)
@given(st.sampled_from(sorted(KINDS)).flatmap(lambda kind: st.tuples(st.just(kind), ids_of(kind))))
def test_any_ids_decode_and_stream_as_sentencepiece_decodes_them(drawn: tuple[str, list[int]]) -> None:
    kind, ids = drawn
    wanted = judge(kind).decode(ids)
    assert ours(kind).decode(ids) == wanted
    assert streamed(ours(kind), ids) == wanted


def test_control_tokens_are_written_out_or_skipped() -> None:
    tokenizer, core = ours("llama"), judge("llama")
    ids = [core.bos_id(), *core.encode("Hello world"), core.eos_id()]
    assert tokenizer.decode(ids, skip_special_tokens=True) == core.decode(ids) == "Hello world"
    assert tokenizer.decode(ids) == "<s>Hello world</s>"
    assert streamed(tokenizer, ids) == "<s>Hello world</s>"


# -- A folder with tokenizer.model: plain text as sentencepiece cuts it, special tokens as the settings say -----------


def folder(path: Path, kind: str, **config: Any) -> Path:
    path.mkdir(exist_ok=True)
    (path / "tokenizer.model").write_bytes(trained(kind))
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


@settings(max_examples=examples(100), deadline=None)
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
