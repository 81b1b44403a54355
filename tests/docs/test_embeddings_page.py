"""docs/embeddings.md: its programs run, its tables have every field, and its limits are those of the code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cortexmlx import Engine
from cortexmlx.protocols import rerank
from cortexmlx.protocols.openai import embeddings
from cortexmlx.server import app
from support.clients.listening import listening
from support.clients.reach import reach_by_openai
from support.embedding.models import write_embedding, write_reranker
from support.pages import blocks, read

PAGE = "docs/embeddings.md"
EMBEDDER, RERANKER = "Qwen/Qwen3-Embedding-0.6B", "Qwen/Qwen3-Reranker-0.6B"


def test_the_programs_of_the_page_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own, client, ranked = (block for block in blocks("python") if block.page == PAGE)
    folders = {EMBEDDER: write_embedding(tmp_path / "embedder"), RERANKER: write_reranker(tmp_path / "Qwen3-Reranker")}

    def opened(name: str) -> Engine:
        return Engine(str(folders[name]), kv_memory="4MB")

    names: dict[str, Any] = {}
    with monkeypatch.context() as patch:
        patch.setattr("cortexmlx.Engine", opened)
        exec(compile(own.text, own.name, "exec", dont_inherit=True), names)
    assert capsys.readouterr().out.strip() in names["notes"]
    with (
        opened(EMBEDDER) as one,
        opened(RERANKER) as other,
        listening(app({EMBEDDER: one, RERANKER: other})) as url,
    ):
        reach_by_openai(url, monkeypatch)
        for block in (client, ranked):
            exec(compile(block.text, block.name, "exec", dont_inherit=True), names)
    width, result = capsys.readouterr().out.splitlines()
    assert one.info.embedding is not None and width.split()[0] == str(one.info.embedding.dimensions)
    assert "relevance_score" in result and "document" in result


def test_the_page_has_every_field_and_the_limits() -> None:
    text = read(PAGE)
    served = embeddings.FIELDS.served | rerank.FIELDS.served
    assert {name for name in served if f"`{name}`" not in text} == set()
    assert f"{embeddings.MAX_INPUTS:,} texts" in text and f"{rerank.MAX_DOCUMENTS:,} texts, or objects" in text
    assert all(path in text for path in (embeddings.URL, *rerank.URLS))
