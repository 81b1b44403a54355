"""A draft model must mean the same by a token, or it is refused with the numbers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cortexmlx import Engine, InvalidRequest
from support.models.tiny import EOS, VOCAB, write_tiny


def changed(model: Path, folder: Path, change: Callable[[dict[str, Any]], None], file: str = "tokenizer.json") -> Path:
    """A copy of a model, with another tokenizer."""
    shutil.copytree(model, folder)
    path = folder / file
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    return folder


def swap(content: dict[str, Any]) -> None:
    vocab = content["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]


def not_special(content: dict[str, Any]) -> None:
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] != "<s>"]


@pytest.mark.parametrize(
    ("change", "file", "said"),
    [
        (swap, "tokenizer.json", rf"2 of {VOCAB} ids stand for other texts, such as \d+: '[ab]' and '[ab]'"),
        (lambda config: config.update(eos_token_id=[EOS, 256]), "config.json", "1 ids end an answer in one of them"),
    ],
)
def test_other_tokens_are_refused(change: Any, file: str, said: str, tiny: Any, tmp_path: Path) -> None:
    draft = changed(tiny("llama"), tmp_path / "draft", change, file)
    with pytest.raises(
        InvalidRequest, match=f"draft cannot draft for .*llama, whose tokens are others: {said}.*--draft"
    ):
        Engine(tiny("llama"), draft=draft)


def test_special_tokens_of_one_of_them_are_refused(tiny: Any, tmp_path: Path) -> None:
    plain = changed(tiny("llama"), tmp_path / "plain", not_special)
    settings = json.loads((plain / "tokenizer_config.json").read_text())
    del settings["bos_token"]
    (plain / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(InvalidRequest, match=r"1 ids are special in one of them only, such as 256 in .*llama"):
        Engine(tiny("llama"), draft=plain)


@pytest.mark.parametrize("width", [VOCAB - 8, VOCAB + 32])
def test_embeddings_may_be_wider_or_narrower(width: int, tiny: Any, tmp_path: Path) -> None:
    with Engine(tiny("llama"), draft=write_tiny(tmp_path / "draft", vocab_size=width), kv_memory="1MB") as engine:
        prompt = [*range(1, 40), VOCAB - 1]
        answer = engine.generate(prompt, max_tokens=30, ignore_eos=True)
    with Engine(tiny("llama"), kv_memory="1MB") as engine:
        assert engine.generate(prompt, max_tokens=30, ignore_eos=True).token_ids == answer.token_ids
