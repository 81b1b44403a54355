"""The tokenizer of a folder: what has all that it takes works without the folder's own code, the rest is named."""

from __future__ import annotations

import io
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from cortexmlx.errors import CortexError, ModelCorrupt, ModelUnsupported
from cortexmlx.models.tokenizers.folder import load_tokenizer
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


def test_a_folder_without_any_is_told_so(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    refused(folder, ModelCorrupt, "has no tokenizer: no tokenizer.json in it, and no tokenizer.model. Download it")


def test_settings_without_the_tokenizer_itself_are_told_so(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
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
