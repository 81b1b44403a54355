"""`cortexmlx serve --allow-pull`: a model that a client asks for is downloaded, planned and served."""

from __future__ import annotations

from pathlib import Path

import pytest

from cortexmlx.cli import engine as engines
from cortexmlx.cli.serve.pool import DefaultSettings, pull_model
from cortexmlx.cli.start import run
from cortexmlx.core.config import EngineConfig
from cortexmlx.errors import InvalidRequest
from cortexmlx.server import ModelPool, ServedModel
from support.models.calling import write_calling


def test_what_is_pulled_is_planned_and_can_be_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, fetched = write_calling(tmp_path / "tiny", "hermes"), list[str]()
    monkeypatch.setattr(engines, "download_model", lambda name, on_progress: fetched.append(name))
    first, config = (
        ServedModel("one", lambda progress: pytest.fail("not asked for"), 1),
        EngineConfig("one", max_rows=2),
    )
    with ModelPool([first], memory="100MB") as pool:
        pull_model(pool, config, DefaultSettings({}, {}), str(folder), lambda progress: None)
        assert fetched == [str(folder)] and pool.names == ("one", str(folder))
        assert 0 < pool.model_memory(str(folder)) <= 100_000_000
        lease = pool.acquire(str(folder))
        assert lease.engine.longest_request == pool.context_length(str(folder)) == 4096
        lease.release()
    with ModelPool([first], memory="50KB") as small, pytest.raises(InvalidRequest, match="--memory"):
        pull_model(small, config, DefaultSettings({}, {}), str(folder), lambda progress: None)


def test_it_needs_a_budget(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", "--allow-pull"]) == 2
    assert "--memory" in capsys.readouterr().err
