"""Fetching from the hub: what is in its cache is used, and every refusal is one line that says what to do."""

from __future__ import annotations

import http.server
import threading
from pathlib import Path

import pytest

from cortexmlx.errors import ModelNotFound
from cortexmlx.models import load_model
from support.folders import cached_model, write_folder


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
