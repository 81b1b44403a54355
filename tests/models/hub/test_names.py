"""Who misspells a model is told the one that looks like it."""

from __future__ import annotations

from pathlib import Path

import pytest

from cortexmlx.errors import ModelNotFound
from cortexmlx.models.hub import cached_repo_names, suggest_name
from cortexmlx.models.resolve import resolve_model


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("smolm2", "smollm2"),
        ("SmolLM2", "smollm2"),
        ("mlx-comunity/Qwen3-4B-4bit", "mlx-community/Qwen3-4B-4bit"),
        ("qwen3-4b-4bit", "mlx-community/Qwen3-4B-4bit"),
        ("gpt", None),
        ("mlx-community/Llama-3-8B", None),
        ("", None),
    ],
)
def test_the_closest_name_is_offered(name: str, meant: str | None) -> None:
    names = ["smollm2", "mlx-community/Qwen3-4B-4bit", "org/other"]
    assert suggest_name(name, names) == (f" Did you mean {meant!r}?" if meant else "")


def test_models_beside_a_misspelt_path_count_and_other_folders_do_not(tmp_path: Path) -> None:
    for name in ("llama-tiny", "lama-tiny2"):
        (tmp_path / name).mkdir()
    (tmp_path / "llama-tiny" / "config.json").write_text("{}")
    (tmp_path / "weights.gguf").write_bytes(b"")
    assert suggest_name(f"{tmp_path}/lama-tiny", []) == f" Did you mean '{tmp_path}/llama-tiny'?"
    assert suggest_name(f"{tmp_path}/wieghts.gguf", []) == f" Did you mean '{tmp_path}/weights.gguf'?"


def test_a_refusal_names_what_is_in_the_hubs_cache(empty_cache: Path) -> None:
    assert cached_repo_names() == []
    (empty_cache / "models--org--some-model").mkdir(parents=True)
    (empty_cache / "datasets--org--data").mkdir()
    assert cached_repo_names() == ["org/some-model"]
    with pytest.raises(ModelNotFound, match=r"no such folder .* Did you mean 'org/some-model'\?"):
        resolve_model("some-modle")
