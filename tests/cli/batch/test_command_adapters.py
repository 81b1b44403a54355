"""`cortexmlx batch` with adapters and with requests for embeddings, on real engines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from openai.types import CreateEmbeddingResponse

from cortexmlx import Engine, SamplingParams
from cortexmlx.cli.start import run
from support.embedding.models import write_embedding
from support.models.adapters import write_adapter
from support.models.calling import write_calling

OPTIONS = ["--no-kv-store", "--kv-memory", "8MB", "--max-tokens", "10"]


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_run_does_not_go_on_with_other_adapters_under_the_same_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_calling(tmp_path / "tiny", "hermes")
    folder = write_adapter(tmp_path / "sql", model, scale=20.0)
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    line = '{"id": "%d", "prompt": "Hello?", "adapter": "sql"}\n'
    source.write_text(line % 1)
    command = ["batch", str(model), str(source), "-o", str(out), "--adapters", f"sql={folder}", *OPTIONS]
    assert run(command) == 0
    source.write_text(line % 1 + line % 2)
    write_adapter(folder, model, scale=60.0)
    assert run([*command, "--resume"]) == 1
    assert "written with other settings (adapter_weights)" in capsys.readouterr().err and len(records(out)) == 1
    write_adapter(folder, model, scale=20.0)
    assert run([*command, "--resume"]) == 0 and len(records(out)) == 2


def test_each_line_may_name_an_adapter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_calling(tmp_path / "tiny", "hermes")
    adapters = {
        name: write_adapter(tmp_path / name, model, scale=scale) for name, scale in (("sql", 20.0), ("b", 60.0))
    }
    asked = {"messages": [{"role": "user", "content": "Hello?"}]}
    chat = {"url": "/v1/chat/completions", "method": "POST"}
    lines: list[dict[str, Any]] = [
        {"id": "base", **asked},
        {"id": "sql", **asked, "adapter": "sql"},
        {"id": "b", **asked, "adapter": "b"},
        {"custom_id": "model", **chat, "body": {**asked, "model": "tiny:sql"}},
        {"custom_id": "alone", **chat, "body": {**asked, "model": "b"}},
        {"custom_id": "foreign", **chat, "body": {**asked, "model": "ft:gpt:x"}},
        {"id": "typo", **asked, "adapter": "sqll"},
        {"custom_id": "other", **chat, "body": {**asked, "model": "tiny:sqll"}},
    ]
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(map(json.dumps, lines)))
    given = [option for name, folder in adapters.items() for option in ("--adapters", f"{name}={folder}")]
    assert run(["batch", str(model), str(source), "-o", str(out), *given, *OPTIONS]) == 1
    with Engine(str(model), kv_memory="8MB", adapters=adapters) as engine:
        judge = {
            name: engine.generate(asked["messages"], SamplingParams(max_tokens=10), adapter=name).text
            for name in (None, "sql", "b")
        }
    assert len(set(judge.values())) == 3
    found = records(out)
    assert [record["text"] for record in found[:3]] == [judge[None], judge["sql"], judge["b"]]
    texts = [record["response"]["body"]["choices"][0]["message"]["content"] for record in found[3:6]]
    assert texts == [judge["sql"], judge["b"], judge[None]]
    assert "did you mean 'sql'" in found[6]["error"]["message"] and "sqll" in found[7]["error"]["message"]
    err = capsys.readouterr().err
    assert "requests name 'ft:gpt:x'" in err
    assert run(["batch", str(model), str(source), "-o", str(out), *given[:2], *OPTIONS, "--resume"]) == 1
    assert 'written with other settings (adapters was {"sql": ' in capsys.readouterr().err


def test_requests_for_embeddings_are_answered_among_others(tmp_path: Path) -> None:
    model = write_embedding(tmp_path / "embedder")
    url = {"method": "POST", "url": "/v1/embeddings"}
    lines: list[dict[str, Any]] = [
        {"custom_id": "e1", **url, "body": {"input": ["one", "two"], "model": "any"}},
        {"custom_id": "c", "method": "POST", "url": "/v1/completions", "body": {"prompt": "hi", "max_tokens": 3}},
        {"custom_id": "e2", **url, "body": {"input": "three", "prompt_name": "query", "dimensions": 8}},
        {"custom_id": "bad", **url, "body": {"input": "three", "prompt_name": "nosuch"}},
        {"custom_id": "empty", **url, "body": {"input": []}},
    ]
    source, out, again = (tmp_path / name for name in ("in.jsonl", "out.jsonl", "again.jsonl"))
    source.write_text("\n".join(map(json.dumps, lines)))
    assert run(["batch", str(model), str(source), "-o", str(out), *OPTIONS]) == 1
    assert run(["batch", str(model), str(source), "-o", str(again), *OPTIONS, "--unordered"]) == 1
    e1, text, e2, bad, empty = records(out)
    with Engine(str(model), kv_memory="8MB") as engine:
        judges = [engine.embed(["one", "two"]), engine.embed(["three"], prompt="query", dimensions=8)]
    for record, judge in zip((e1, e2), judges, strict=True):
        body = CreateEmbeddingResponse.model_validate(record["response"]["body"])
        assert np.allclose(np.array([item.embedding for item in body.data], np.float32), judge.vectors, atol=1e-5)
        assert body.usage.prompt_tokens == sum(judge.prompt_tokens)
    assert text["response"]["body"]["object"] == "text_completion"
    assert "nosuch" in bad["error"]["message"] and "no texts" in empty["error"]["message"]
    assert {record["custom_id"] for record in records(again)} == {"e1", "c", "e2", "bad", "empty"}
