"""Fetching from the hub: what is in its cache is used, and every refusal is one line that says what to do."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import pytest

from cortexmlx.errors import ModelCorrupt, ModelNotFound, ModelUnsupported
from cortexmlx.models import load_model
from cortexmlx.models.draft_head import read_draft_head
from cortexmlx.models.folder_config import read_config
from cortexmlx.models.hub import fetch_repo
from cortexmlx.models.load import find_head_folder
from support.folders import write_folder
from support.models.draft_heads import as_made, split_into_shards, write_draft_head
from support.models.hub import Hub
from support.models.tiny import write_tiny


@pytest.mark.parametrize(("name", "value"), [("HF_HUB_OFFLINE", True), ("ENDPOINT", "http://127.0.0.1:9")])
def test_a_hub_id_without_network_says_so(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: object
) -> None:
    """Port 9 of this machine refuses connections: the real error path, without any network."""
    monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
    with pytest.raises(ModelNotFound, match=r"not on this machine.* the hub cannot be reached") as caught:
        load_model("some-org/some-model")
    assert "\n" not in str(caught.value)


def test_what_cannot_be_a_hub_id_is_not_asked_for(hub: Hub) -> None:
    with pytest.raises(ModelNotFound, match="cannot be a hub id"):
        fetch_repo("org/a..b--c")
    assert not hub.asked


def test_a_misspelt_name_is_told_the_one_in_the_cache(hub: Hub) -> None:
    fetch_repo("org/tiny")
    with pytest.raises(ModelNotFound, match=r"no model 'org/tny' .* Did you mean 'org/tiny'\?"):
        fetch_repo("org/tny")


@pytest.mark.parametrize(
    ("part", "status", "code", "says"),
    [
        ("/api/models", 404, "RepoNotFound", "the hub has no model 'org/tiny'"),
        ("/api/models", 401, "RepoNotFound", "the hub has no model 'org/tiny' (or it is private"),
        ("/api/models", 401, "", "refuses 'org/tiny' to you (401)"),
        ("/api/models", 403, "GatedRepo", "accept its terms"),
        ("/api/models", 403, "", "refuses 'org/tiny' to you (403)"),
        ("/api/models", 429, "", "too many requests"),
        ("/api/models", 500, "", "answers 500"),
        ("model-00001", 401, "", "refuses 'org/tiny' to you (401)"),
        ("model-00001", 403, "GatedRepo", "accept its terms"),
        ("model-00001", 404, "EntryNotFound", "answers 404"),
        ("model-00001", 503, "", "answers 503|503 Serv"),
    ],
)
def test_every_refusal_is_one_line_that_says_what_to_do(hub: Hub, part: str, status: int, code: str, says: str) -> None:
    hub.refuse[part] = [status]
    hub.headers |= {"X-Error-Code": code, "Retry-After": "0"} if code else {"Retry-After": "0"}
    with pytest.raises(ModelNotFound) as caught:
        fetch_repo("org/tiny")
    assert any(words in str(caught.value) for words in says.split("|")) and "\n" not in str(caught.value)
    hub.refuse.clear()
    assert (fetch_repo("org/tiny") / "config.json").is_file()


def test_a_repository_without_a_config_says_how_to_use_its_files(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    (empty_cache / "snapshot").mkdir(parents=True)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda repo, **_: str(empty_cache / "snapshot"))
    with pytest.raises(ModelNotFound, match="hf download org/files-GGUF"):
        load_model("org/files-GGUF")


def test_a_hub_id_is_downloaded_into_the_cache_and_loaded_from_there(hub: Hub, tmp_path: Path) -> None:
    hub.repos["org/new"] = write_folder(tmp_path / "new")
    (hub.repos["org/new"] / "modeling.py").write_text("raise SystemExit")
    for _ in range(2):
        loaded = load_model("org/new")
        assert loaded.name == "org/new" and {"model.safetensors", "config.json"} <= {
            f.name for f in loaded.path.iterdir()
        }
        assert not (loaded.path / "modeling.py").exists(), "code is left where it is"
        asked, hub.asked = hub.asked, []
    assert not asked, "the second time it is in the cache"


def test_of_a_checkpoint_only_the_files_with_the_draft_head_are_fetched(hub: Hub, tmp_path: Path) -> None:
    original, lost = tmp_path / "original", write_tiny(tmp_path / "lost", "qwen3_5")
    head = write_draft_head(original, "qwen3_5", raw=True, store=as_made)
    split_into_shards(original)
    hub.repos["org/original"] = original
    for again in (False, True):
        folder = find_head_folder("org/original", lost, lambda progress: None)
        assert folder is not None
        read = read_draft_head(folder, read_config(folder), load_model(lost).model)
        assert read is not None and mx.allclose(read.norm.weight, head["norm.weight"], atol=1e-5)
        weights = {name for _, name, _ in hub.asked if "safetensors" in name and "index" not in name}
        assert weights == ({"model-00002-of-00002.safetensors"} if not again else set())
        hub.asked.clear()
    assert find_head_folder("org/original", write_tiny(tmp_path / "llama"), lambda progress: None) is None
    assert len(list(fetch_repo("org/original").glob("model*.safetensors"))) == 2, "the whole model can come later"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_type": "grok99"}, "has no architecture 'grok99'"),
        ({"model_file": "own.py"}, "brings its own model code"),
        ({"model_type": None}, "does not say which model_type"),
    ],
)
def test_a_model_that_cannot_run_is_refused_before_its_weights_are_fetched(
    changes: dict[str, object], says: str, hub: Hub
) -> None:
    config = hub.repos["org/tiny"] / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    with pytest.raises((ModelUnsupported, ModelCorrupt), match=says):
        load_model("org/tiny")
    assert hub.sent == 0
