"""Loading, whatever the model comes from: what becomes of its weights, what it says of itself, and how far it is."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

import mlx.core as mx
import pytest

from cortexmlx.errors import ModelCorrupt, ModelNotFound
from cortexmlx.models import load_model
from cortexmlx.models.load import check_model, load_without_weights
from cortexmlx.types.progress import Progress
from support.folders import CONFIG, write_folder
from support.gguf.models import write_model

pytestmark = pytest.mark.usefixtures("a_linux_cpu")


def test_half_precision_becomes_float32_on_a_cpu_even_when_weights_may_not_grow(tmp_path: Path) -> None:
    loaded = load_model(write_folder(tmp_path / "m", quantize=True, dtype="float16"), dequantize=False)
    assert loaded.dtype == "float32"
    assert hasattr(loaded.model.layers[0].mlp.up_proj, "scales")
    assert any("quantized" in note for note in loaded.notes)


def test_nothing_stays_of_the_numbers_that_a_model_is_built_with(tmp_path: Path) -> None:
    """A server that loads models all day would grow by 64 KB a load."""
    load_model(write_folder(tmp_path / "m"))
    graph = io.StringIO()
    mx.export_to_dot(graph, *mx.random.state)
    assert "RandomBits" not in graph.getvalue() and "Split" not in graph.getvalue()


def test_loading_reports_progress(tmp_path: Path) -> None:
    seen: list[Progress] = []
    load_model(write_folder(tmp_path / "m"), on_progress=seen.append)
    assert {(p.what, p.unit) for p in seen} == {("loading", "steps")}
    fractions = [p.fraction for p in seen]
    assert fractions == sorted(fractions) and fractions[0] == 0.0 and fractions[-1] == 1.0


def test_a_context_length_that_is_not_stated_is_assumed_and_said(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m")
    config = {key: value for key, value in CONFIG.items() if key != "max_position_embeddings"}
    (folder / "config.json").write_text(json.dumps(config))
    loaded = load_model(folder)
    assert loaded.context_length == 2048
    assert any("2048" in note for note in loaded.notes)


def test_dequantizing_can_be_switched_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CORTEXMLX_DEQUANTIZE", "0")
    loaded = load_model(write_model(tmp_path / "tiny.gguf", type_name="Q4_0"))
    assert hasattr(loaded.model.layers[0].mlp.up_proj, "scales")
    assert loaded.weight_bytes < loaded.parameters


def test_weights_that_are_larger_than_the_machines_memory_are_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    load_model(write_folder(tmp_path / "m"))
    assert not caplog.records
    monkeypatch.setattr("cortexmlx.models.load.working_set_bytes", lambda: 1 << 12)
    load_model(write_folder(tmp_path / "n"))
    assert "the weights of n take" in caplog.text and "this machine has 4 KiB for models" in caplog.text


def test_a_machine_with_little_memory_keeps_weights_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_model(tmp_path / "tiny.gguf", type_name="Q4_0")
    parameters = load_model(path).parameters
    for memory, packed in ((parameters * 16, True), (parameters * 16 + 16, False)):
        monkeypatch.setattr("cortexmlx.models.load.memory_bytes", lambda memory=memory: memory)
        assert hasattr(load_model(path).model.layers[0].mlp.up_proj, "scales") is packed


@pytest.mark.parametrize("kind", ["folder", "gguf"])
def test_without_weights_a_model_says_the_same_of_itself(kind: str, tmp_path: Path) -> None:
    if kind == "gguf":
        path = write_model(tmp_path / "tiny.gguf", type_name="Q4_0")
    else:
        path = write_folder(tmp_path / "m")
        (path / "generation_config.json").write_text('{"temperature": 0.5, "top_p": 7}')
        (path / "adapters.safetensors").write_bytes(b"")
    whole, text = load_model(path), load_without_weights(path)
    assert text.model is None and (text.weight_bytes, text.parameters) == (0, 0)
    same = ("name", "path", "config", "context_length", "adapter", "sampling", "identity")
    assert [getattr(text, name) for name in same] == [getattr(whole, name) for name in same]
    assert text.tokenizer.encode("the cat") == whole.tokenizer.encode("the cat")
    assert set(text.notes) <= set(whole.notes) and len(text.notes) >= (2 if kind == "folder" else 0)
    with pytest.raises(ModelNotFound):
        load_without_weights(path, adapter=tmp_path / "none")


def test_without_weights_a_damaged_model_is_refused_as_well(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m")
    next(folder.glob("*.safetensors")).write_bytes(b"damaged")
    with pytest.raises(ModelCorrupt):
        load_without_weights(folder)


@pytest.mark.parametrize("what", ["config.json", "cut short", "a shard", "everything"])
def test_a_model_is_looked_at_before_it_is_loaded(what: str, tmp_path: Path) -> None:
    """What loading would refuse because of its files is refused without reading the weights."""
    folder = write_folder(tmp_path / "m")
    check_model(folder, lambda progress: None)
    (weights,) = folder.glob("*.safetensors")
    match what:
        case "config.json":
            (folder / what).unlink()
        case "cut short":
            weights.write_bytes(weights.read_bytes()[:-1])
        case "a shard":
            (folder / "model.safetensors.index.json").write_text(
                json.dumps({"weight_map": {"a": weights.name, "b": "model-2.safetensors"}})
            )
        case _:
            shutil.rmtree(folder)
    for look in (lambda: check_model(folder, lambda progress: None), lambda: load_model(folder)):
        with pytest.raises((ModelCorrupt, ModelNotFound)):
            look()
