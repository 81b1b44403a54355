"""`cortexmlx cache`: what it shows, and that it removes the store's files and no others."""

from __future__ import annotations

import json
import os
from pathlib import Path
from unittest.mock import Mock

import pytest
from disk.test_stored_prefix import fill

from cortexmlx.cli.start import run
from support.cli.cli_fakes import Fakes
from support.store.records import opened, record


def test_it_says_which_models_take_how_much_and_removes_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "kv"
    monkeypatch.setenv("CORTEXMLX_KV_STORE", str(folder))
    assert run(["cache"]) == 0
    assert capsys.readouterr() == (f"{folder}  0 B: there is no such folder\n", "") and not folder.exists()
    segment_store = opened(folder)
    segment_store.write("large", [record(n) for n in range(20)])
    segment_store.write("small one", [record(n) for n in range(20, 23)])
    sizes = {line.model: line.bytes for line in segment_store.segments()}
    segment_store.close()
    assert run(["cache"]) == 0
    first, *rest = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{folder}  ")
    assert [line[:13] for line in rest] == ["  large      ", "  small one  "] and "20 blocks" in rest[0]
    assert run(["cache", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert {m["model"]: m["bytes"] for m in said["models"]} == sizes and said["bytes"] == sum(sizes.values())
    (folder / f"{'a' * 32}.transcript").write_bytes(b"x" * 2000)
    assert run(["cache"]) == 0
    assert "  (conversations of servers)   1.95 KiB" in [*capsys.readouterr().out.splitlines()]
    (folder / "mine.txt").write_text("mine")
    with monkeypatch.context() as refusing:
        refusing.setattr(Path, "unlink", Mock(side_effect=PermissionError("nobody may")))
        assert run(["cache", "--clear"]) == 1
        assert "files could not be removed" in capsys.readouterr().err
        for path in folder.glob("*.safetensors"):
            path.rename(tmp_path / path.name)
        assert run(["cache", "--clear"]) == 1
        assert "cannot be cleared: nobody may" in capsys.readouterr().err  # a transcript
    for path in tmp_path.glob("*.safetensors"):
        path.rename(folder / path.name)
    assert run(["cache", "--clear"]) == 0
    assert "removed" in capsys.readouterr().out
    assert sorted(os.listdir(folder)) == ["index.sqlite", "mine.txt", "secret"]
    assert run(["cache", "--kv-store", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"path": str(folder), "bytes": 0, "models": []}


def test_a_folder_that_is_no_store_is_an_error_of_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "secret").mkdir()
    assert run(["cache", "--kv-store", str(tmp_path)]) == 1
    out, err = capsys.readouterr()
    assert out == "" and "cannot be used" in err and len(err.splitlines()) <= 2


def test_looking_into_a_folder_that_is_no_store_leaves_nothing_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.safetensors").write_text("mine")
    shown = f"{tmp_path}  0 B\n"
    freed = json.dumps({"path": str(tmp_path), "freed": 0}) + "\n"
    for more, said in (([], shown), (["--clear"], "0 B removed\n"), (["--clear", "--json"], freed)):
        assert run(["cache", "--kv-store", str(tmp_path), *more]) == 0
        assert capsys.readouterr().out == said and os.listdir(tmp_path) == ["model.safetensors"], more
    for options, said in (
        (["cache", "--kv-store", "model.safetensors"], "model.safetensors is no folder"),
        (["cache", "--kv-store", "none", "--clear"], "there is no folder none, so nothing was removed"),
        (["cache", "export", "rules", "rules.kv", "-m", "x", "--messages", "none"], "there is no file none"),
    ):
        assert run(options) == 1 and capsys.readouterr().err == f"error: {said}\n"


def test_a_file_that_is_written_and_a_folder_that_takes_it_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store = opened(tmp_path / "one")
    fill(store)
    store.close()
    assert run(["cache", "export", "rules", "rules.kv", "--kv-store", "one"]) == 0
    assert capsys.readouterr().out.endswith(" KiB, written to rules.kv\n")
    assert run(["cache", "import", "rules.kv", "--kv-store", "two"]) == 0
    assert capsys.readouterr().out == f"rules: 48 tokens of a model, into {tmp_path / 'two'}\n"


def test_chat_and_batch_have_a_store_and_generate_where_one_is_named(
    fakes: Fakes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CORTEXMLX_KV_STORE", str(tmp_path / "default"))
    (tmp_path / "in").write_text("a\n")
    lines = [f"batch fake {tmp_path / 'in'}", "generate fake -p hi"]
    for line, usual in zip(lines, (tmp_path / "default", None), strict=True):
        assert run(line.split()) == 0
        assert fakes.engine.options.kv_store == usual and fakes.engine.options.kv_store_bytes == 4 * 10**9
        assert run([*line.split(), "--kv-store", "here", "--kv-store-bytes", "1GiB"]) == 0
        assert (fakes.engine.options.kv_store, fakes.engine.options.kv_store_bytes) == ("here", 2**30)
    assert run([*lines[0].split(), "--no-kv-store"]) == 0 and fakes.engine.options.kv_store is None
    assert run([*lines[0].split(), "--no-kv-store", "--kv-store", "here"]) == 2
    assert run([*lines[0].split(), "--kv-store-bytes", "lots"]) == 2


@pytest.mark.parametrize("given", [["--kv-store", "here"], ["--clear"], ["--json"]])
def test_an_option_before_a_subcommand_is_not_left_out_silently(given: list[str]) -> None:
    """It would export from, and import into, the usual folder."""
    assert run(["cache", *given, "why", "--url", "http://127.0.0.1:9"]) == 2


def test_what_others_call_it_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    for typed, meant in (("clear", " --clear"), ("list", ""), ("rm", " --remove NAME")):
        assert run(["cache", typed]) == 2
        assert capsys.readouterr().err.endswith(f"No such command '{typed}'. Type: cortexmlx cache{meant}\n")
