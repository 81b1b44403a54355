"""The tokenizer of a folder: what has all that it takes works without the folder's own code, the rest is named."""

from __future__ import annotations

import io
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from cortexmlx.errors import CortexError, ModelCorrupt, ModelUnsupported
from cortexmlx.models.tokenizers.folder import load_tokenizer
from cortexmlx.models.tokenizers.shared import SharedTokenizer
from support.models.sentencepieces import trained
from support.models.tiny import write_tiny

CODE = {"auto_map": {"AutoTokenizer": ["own_code.OwnTokenizer", None]}, "tokenizer_class": "OwnTokenizer"}
RANKS = b"IQ== 0\nIg== 1\n"
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny(tmp_path / "m")


def configure(folder: Path, **changes: Any) -> None:
    """Settings of the tokenizer; None takes one out."""
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in settings.items() if value is not None}))


def refused(folder: Path, error: type[CortexError], *words: str) -> None:
    with pytest.raises(error) as caught:
        load_tokenizer(folder, {257})
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_code_of_its_own_is_not_run_and_not_needed_where_the_tokens_are_written_out(folder: Path) -> None:
    plain, notes = load_tokenizer(folder, {257})
    assert notes == ()
    configure(folder, **CODE)
    (folder / "own_code.py").write_text(f"open({str(folder / 'ran')!r}, 'w')")
    own, notes = load_tokenizer(folder, {257})
    text = "Hello  wörld, the and 123"
    assert own.encode(text) == plain.encode(text)
    assert own.eos_token_ids == plain.eos_token_ids
    assert own.apply_chat_template(MESSAGES, tokenize=False) == plain.apply_chat_template(MESSAGES, tokenize=False)
    assert notes == ("its tokenizer's own Python code is not run: tokenizer.json is read as it is",)
    assert not (folder / "ran").exists()


def test_a_sentencepiece_model_needs_no_code_either(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    configure(folder, **CODE)
    (folder / "tokenizer.model").write_bytes(trained("llama"))
    tokenizer, _ = load_tokenizer(folder, {257})
    assert tokenizer.decode(tokenizer.encode("Hello"), skip_special_tokens=True) == "Hello"


CUT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Llama 3's words."""
TEXTS = ("Hello  the and café, 'S 12345", "x²+½ №5 ﬁ cafe\u0301\r\n\n  def f(x):\n\treturn  1 # नमस्ते 漢字", " ", "\n\n")


def described(folder: Path, **changes: Any) -> Tokenizer:
    """tokenizer.json with these parts instead of its own, as the tokenizers library reads it."""
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    content["model"] |= changes.pop("model", {})
    file.write_text(json.dumps(content | changes))
    return Tokenizer.from_file(str(file))


def split(pattern: str) -> dict[str, Any]:
    cut = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    to_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return {"type": "Sequence", "pretokenizers": [cut, to_bytes]}


MARKED = {
    "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "\u2581"}, {"type": "NFKC"}]},
    "pre_tokenizer": None,
    "decoder": {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True},
    "model": {"byte_fallback": True},
}


@pytest.mark.parametrize(
    ("name", "kind", "changes"),
    [
        ("GPT2Tokenizer", "llama", {"pre_tokenizer": split(CUT)}),
        ("Qwen2TokenizerFast", "qwen3", {"pre_tokenizer": split(CUT), "model": {"ignore_merges": True}}),
        ("PreTrainedTokenizerFast", "qwen2", {"pre_tokenizer": split(CUT)}),
        ("LlamaTokenizer", "llama", MARKED),
        ("GemmaTokenizer", "gemma3_text", {"pre_tokenizer": split(r"\p{N}")}),
        ("T5Tokenizer", "llama", {}),
        ("BertTokenizer", "qwen3", {"truncation": {"max_length": 3, "strategy": "LongestFirst", "stride": 0}}),
        ("NewlineTokenizer", "llama", {}),
    ],
)
def test_tokenizer_json_says_how_text_is_cut_whatever_class_is_named(
    folder: Path, name: str, kind: str, changes: Any
) -> None:
    """The tokenizers library itself reads the file, with the beginning of text that its post-processor adds."""
    begins = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}], "pair": []}
    begins["single"] += [{"Sequence": {"id": "A", "type_id": 0}}]
    begins["special_tokens"] = {"<s>": {"id": "<s>", "ids": [256], "tokens": ["<s>"]}}
    core = described(folder, post_processor=begins, **changes)
    core.no_truncation()
    configure(folder, tokenizer_class=name, eos_token="</s>", bos_token=None)
    config = json.loads((folder / "config.json").read_text()) | {"model_type": kind}
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer, notes = load_tokenizer(folder, {7})
    shared = SharedTokenizer(tokenizer)
    for text in TEXTS:
        assert shared.encode(text) == core.encode(text).ids
    assert tokenizer.eos_token_ids == {7, 257}
    assert len(notes) == 1 and "tokenizer.json is read as it is" in notes[0]


def test_a_class_that_cuts_text_as_the_file_says_is_no_remark(folder: Path) -> None:
    """As the files of Qwen 2 and 3 are, whose settings for places and decoder are not those of the class."""
    words = CUT.replace("{1,3}", "")
    plain = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    core = described(folder, pre_tokenizer=split(words), normalizer={"type": "NFC"}, decoder=plain)
    configure(folder, tokenizer_class="Qwen2Tokenizer")
    tokenizer, notes = load_tokenizer(folder, set())
    assert notes == ()
    assert [tokenizer.encode(text) for text in TEXTS] == [core.encode(text).ids for text in TEXTS]


def test_what_only_the_template_ends_a_turn_with_ends_an_answer(folder: Path) -> None:
    known = json.loads((folder / "tokenizer.json").read_text())
    end = known["added_tokens"][0] | {"id": 300, "content": "<|over|>"}
    vocab = {token: index for token, index in known["model"]["vocab"].items() if index != 300} | {"<|over|>": 300}
    described(folder, added_tokens=[*known["added_tokens"], end], model={"vocab": vocab})
    configure(folder, chat_template="{% for m in messages %}{{ m.content }}<|over|>{% endfor %}")
    assert load_tokenizer(folder, {7})[0].eos_token_ids == {7, 257, 300}


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("own.tiktoken", RANKS, ("own.tiktoken", "Python code", "tokenizer.json")),
        ("tiktoken.model", RANKS, ("tiktoken.model", "Python code")),
        ("tokenizer.model", RANKS, ("tokenizer.model", "tiktoken", "not a sentencepiece")),
        ("tekken.json", b'{"vocab": []}', ("tekken.json", "mistral-common", "tokenizer.json")),
        ("own_code.py", b"", ("code of its own", "refused")),
    ],
)
def test_what_only_code_can_read_is_refused_by_the_name_of_its_file(
    folder: Path, name: str, content: bytes, words: tuple[str, ...]
) -> None:
    (folder / "tokenizer.json").unlink()
    configure(folder, **CODE)
    (folder / name).write_bytes(content)
    refused(folder, ModelUnsupported, *words)


@pytest.mark.parametrize("settings", [True, False])
def test_a_folder_without_a_tokenizer_is_told_so(folder: Path, settings: bool) -> None:
    (folder / "tokenizer.json").unlink()
    if not settings:
        (folder / "tokenizer_config.json").unlink()
    refused(folder, ModelCorrupt, "has no tokenizer: no tokenizer.json in it, and no tokenizer.model. Download it")
    (folder / "tokenizer.json").mkdir()
    refused(folder, ModelCorrupt, "tokenizer.json is a folder, and should be a file")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "is empty. Download it again."),
        ("<html>", "cannot be read as JSON"),
        ("version https://git-lfs.github.com/spec/v1\n", "is a git-lfs pointer"),
        ("[]", "is not a JSON object"),
    ],
)
def test_a_damaged_file_is_named_with_the_next_step(folder: Path, name: str, content: str, says: str) -> None:
    (folder / name).write_text(content)
    refused(folder, ModelCorrupt, f"{folder / name} {says}")


def test_vocabulary_and_merges_in_files_of_their_own_are_read(folder: Path) -> None:
    plain, _ = load_tokenizer(folder, {257})
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = "\n".join(" ".join(pair) for pair in model["merges"])
    (folder / "merges.txt").write_text(f"#version: 0.2\n{merges}\n")
    (folder / "tokenizer.json").unlink()
    configure(folder, tokenizer_class="GPT2Tokenizer")
    apart, _ = load_tokenizer(folder, {257})
    assert apart.encode("the and a café") == plain.encode("the and a café")


def test_what_transformers_remarks_goes_to_the_log_and_not_to_the_terminal(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from transformers.utils.logging import warning_once

    configure(folder, tokenizer_class="LlamaTokenizer")
    warning_once.cache_clear()
    terminal = logging.StreamHandler(io.StringIO())
    logging.getLogger("transformers").addHandler(terminal)
    try:
        with caplog.at_level(logging.WARNING, "cortexmlx"):
            load_tokenizer(folder, {257})
    finally:
        logging.getLogger("transformers").removeHandler(terminal)
    assert terminal.stream.getvalue() == ""
    assert any("ByteLevel" in record.message for record in caplog.records if record.name == "cortexmlx")


@pytest.mark.parametrize(("field", "value"), [("hidden_size", "64"), ("layer_types", 3), ("num_attention_heads", 0)])
def test_a_configuration_that_is_none_is_not_blamed_on_the_tokenizer(folder: Path, field: str, value: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {field: value}))
    refused(folder, ModelCorrupt, f"{file} does not describe a model")


def test_a_broken_tokenizer_is_not_blamed_on_the_configuration(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"model": 3}')
    refused(folder, ModelCorrupt, f"the tokenizer in {folder} cannot be read")
