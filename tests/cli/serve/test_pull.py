"""`cortexmlx serve --allow-pull`: a model that a client asks for is downloaded, planned and served."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from cortexmlx.cli import engine as engines
from cortexmlx.cli.serve.pool import DefaultSettings, pull_model
from cortexmlx.cli.start import run
from cortexmlx.core.config import EngineConfig
from cortexmlx.errors import InvalidRequest, ModelCorrupt, ModelNotFound
from cortexmlx.server import ModelPool, ServedModel
from support.folders import cached_model
from support.models.calling import write_calling


def test_what_is_pulled_is_planned_and_can_be_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    snapshot = cached_model(tmp_path / "hub", "org/tiny", complete=False)
    shutil.rmtree(snapshot)
    write_calling(snapshot, "hermes")
    write_calling(tmp_path / "here" / "org" / "mine", "hermes")
    monkeypatch.chdir(tmp_path / "here")
    fetched = list[str]()
    monkeypatch.setattr(engines, "download_model", lambda name, on_progress: fetched.append(name))
    first, config = (
        ServedModel("one", lambda progress: pytest.fail("not asked for"), 1),
        EngineConfig("one", max_rows=2, draft="/one's/draft", adapter="/one's/adapter"),
    )

    def pull(pool: ModelPool, name: str) -> None:
        pull_model(pool, config, DefaultSettings({}, {}), name, lambda progress: None)

    with ModelPool([first], memory="100MB") as pool:
        pull(pool, "org/tiny")
        assert fetched == ["org/tiny"] and pool.names == ("one", "org/tiny")
        assert 0 < pool.model_memory("org/tiny") <= 100_000_000
        lease = pool.acquire("org/tiny")
        assert lease.engine.longest_request == pool.context_length("org/tiny") == 4096
        lease.release()
        with pytest.raises(ModelNotFound, match="hub id"):  # a folder of the server's is nobody's to serve
            pull(pool, "org/mine")
        (cached_model(tmp_path / "hub", "org/broken", complete=False) / "config.json").write_text("[")
        with pytest.raises(ModelCorrupt, match="org/broken") as told:
            pull(pool, "org/broken")
        assert str(tmp_path) not in str(told.value)  # where its files are is nobody's business
    fetched.clear()
    kept = replace(first, memory=97_000_000)
    with ModelPool([kept], memory="100MB", keep=("one",)) as pool:  # it is planned for what is left beside them
        pull(pool, "org/tiny")
        assert pool.model_memory("org/tiny") <= 3_000_000
    assert fetched.pop() == "org/tiny"
    nothing_left = ModelPool([replace(first, memory=99_960_000)], memory="100MB", keep=("one",))
    for small in (ModelPool([first], memory="50KB"), nothing_left):
        with small, pytest.raises(InvalidRequest, match="--memory"):
            pull(small, "org/tiny")
    assert not fetched  # no gigabytes for what does not fit


def test_it_needs_a_budget(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", "--allow-pull"]) == 2
    assert "--memory" in capsys.readouterr().err
