"""docs/images.md: its programs run with a tiny model that sees."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("PIL")

import cortexmlx
from cortexmlx import Engine
from cortexmlx.protocols.images import MAX_IMAGES
from cortexmlx.server import app
from cortexmlx.server.settings import ServerSettings
from cortexmlx.vision import images
from support.clients.listening import listening
from support.clients.reach import reach_by_openai
from support.models.sighted import picture, write_sighted
from support.pages import blocks, read

PAGE = "docs/images.md"


def test_the_programs_of_the_page_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    picture(64, 48).save("photo.jpg")
    own, client = (block for block in blocks("python") if block.page == PAGE)
    with Engine(str(write_sighted(tmp_path / "qwen3-vl", "qwen3_vl")), kv_memory="8MB") as engine:
        monkeypatch.setattr(cortexmlx, "Engine", lambda name: engine)
        exec(compile(own.text, own.name, "exec", dont_inherit=True), {})
        assert capsys.readouterr().out.endswith("\n35 tokens\n")
        with listening(app(engine)) as url:
            reach_by_openai(url, monkeypatch)
            exec(compile(client.text, client.name, "exec", dont_inherit=True), {})
            assert capsys.readouterr().out


def test_its_limits_are_those_of_the_code() -> None:
    assert (images.MAX_FILE_BYTES, images.MAX_PIXELS, images.MAX_SIDE) == (20 << 20, 64_000_000, 65_535)
    assert MAX_IMAGES == 100
    assert ServerSettings().max_body == 16 << 20
    page: Any = read(PAGE)
    assert all(words in page for words in ("20 MiB, 64 million pixels and 65,535 pixels", "- 100 images", "16 MiB"))
