"""`cortexmlx embed` from file to file, with made up embeddings."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cortexmlx.cli.embed import run as runs
from cortexmlx.cli.embed.files import make_header
from cortexmlx.cli.start import run
from cortexmlx.errors import EngineClosed
from support.cli.cli_fakes import Fakes
from support.fakes import numbers
from support.fakes.numbers import INFO, MadeUpNumbers, vector_of

Opened = list[MadeUpNumbers]
LINES = '{"id": "a", "text": "one", "title": "kept out"}\n{"input": "two"}\n{"text": [1, 2, 3]}\n'
TEXTS: tuple[Any, ...] = ("one", "two", [1, 2, 3])


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_text(LINES)
    return path


@pytest.fixture(params=["jsonl", "npy"])
def out(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return tmp_path / f"out.{request.param}"


def embed(*arguments: object) -> int:
    return run(["embed", *map(str, arguments)])


def vectors_in(path: Path) -> np.ndarray:
    """The vectors of a file; NaN for what has none."""
    if path.suffix == ".npy":
        return np.load(path)
    found = [json.loads(line).get("embedding") for line in path.read_text().splitlines()]
    width = max((len(each) for each in found if each is not None), default=INFO.dimensions)
    return np.array([[np.nan] * width if each is None else each for each in found], np.float32).reshape(-1, width)


def expected(texts: Sequence[Any], *how: Any) -> np.ndarray:
    return np.stack([vector_of(text, *how) for text in texts])


def test_each_text_has_a_row_in_the_order_of_the_input(embedders: Opened, source: Path, out: Path) -> None:
    assert embed("model", source, "-o", out) == 0
    assert np.array_equal(vectors_in(out), expected(TEXTS))
    assert embed("model", source, "-o", out, "--force", "--dimensions", 4, "--prompt", "query") == 1
    found = vectors_in(out)
    assert np.array_equal(found[:2], expected(TEXTS[:2], "query", 4)) and np.isnan(found[2]).all(), "no prompt for ids"


def test_records_have_ids_and_tokens_and_what_was_cut_off(
    embedders: Opened, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "in.txt"
    source.write_text("one\n\n" + "x" * 100 + "\n")
    assert embed("model", source, "--truncate") == 0
    out, err = capsys.readouterr()
    first, second = map(json.loads, out.splitlines())
    assert first == {"id": 1, "embedding": first["embedding"], "prompt_tokens": 3}
    assert (second["id"], second["prompt_tokens"], second["truncated"]) == (3, INFO.max_tokens, True)
    assert np.array_equal(np.array(first["embedding"], np.float32), vector_of("one"))
    assert "2 embedded, 0 failed, 67 tokens in " in err


def test_a_line_without_a_text_is_an_error_in_its_place(
    embedders: Opened, tmp_path: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "in.jsonl"
    long = "x" * (INFO.max_tokens + 1)
    bad = ["{oops", '{"id": "b", "txt": 1}', '{"text": ""}', '{"text": "\\ud800"}', '{"text": [1, 1e9]}', "[]"]
    bad += ['{"text": "a", "input": "b"}', '{"id": 1.5, "text": "a"}', json.dumps({"id": "long", "text": long})]
    bad += ['{"custom_id": "c", "method": "POST", "url": "/v1/embeddings", "body": {"input": "a"}}']
    source.write_text("\n".join(['{"text": "one"}', *bad, '{"text": "two"}']))
    assert embed("model", source, "-o", out) == 1
    found = vectors_in(out)
    assert np.array_equal(found[[0, -1]], expected(("one", "two"))) and np.isnan(found[1:-1]).all()
    assert len(found) == len(bad) + 2 and f"2 embedded, {len(bad)} failed" in capsys.readouterr().err
    if out.suffix == ".jsonl":
        errors = [json.loads(line)["error"] for line in out.read_text().splitlines()[1:-1]]
        assert [error["line"] for error in errors] == list(range(2, len(bad) + 2))
        for says, error in zip(("not JSON", "`text` is missing", "is empty", "surrogate"), errors, strict=False):
            assert says in error["message"]
        assert "65 tokens" in errors[8]["message"] and "cortexmlx batch" in errors[9]["message"]
    assert embed("model", source, "-o", out, "--resume") == 1 and len(embedders) == 1


def test_an_id_may_be_any_text(embedders: Opened, tmp_path: Path, out: Path) -> None:
    source, ids = tmp_path / "in.jsonl", ["\ud800x", "x" * 5000, '"embedding": ']
    lines = [{"id": name, "text": text} for name in ids for text in ("one", "")]
    source.write_text("\n".join(map(json.dumps, lines)))
    assert embed("model", source, "-o", out) == 1
    assert np.array_equal(vectors_in(out)[::2], expected(("one",) * 3))
    assert embed("model", source, "-o", out, "--resume") == 1 and len(embedders) == 1, "a text has no vector"


@pytest.mark.parametrize("cut", [0, 7])
def test_a_run_that_was_cut_off_goes_on_and_computes_nothing_twice(
    embedders: Opened, source: Path, out: Path, cut: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "MAX_CHUNK_TEXTS", 1)
    monkeypatch.setattr(runs, "CHUNKS_AT_ONCE", 1)
    whole = out.with_name(f"whole{out.suffix}")
    assert embed("model", source, "-o", whole) == 0
    computed = MadeUpNumbers.embed

    def ends(engine: MadeUpNumbers, texts: Any, **options: Any) -> Any:
        if texts == ["two"]:
            raise EngineClosed("the engine ended")
        return computed(engine, texts, **options)

    monkeypatch.setattr(MadeUpNumbers, "embed", ends)
    assert embed("model", source, "-o", out) == 1
    with out.open("ab") as file:
        file.write(b'{"id": "b", "embedding": [0.125, '[:cut])
    monkeypatch.setattr(MadeUpNumbers, "embed", computed)
    assert embed("model", source, "-o", out) == 1, "it is there"
    assert embed("model", source, "-o", out, "--resume") == 0
    assert embedders[-1].asked == [("two",), ([1, 2, 3],)]
    assert np.array_equal(vectors_in(out), vectors_in(whole))
    assert out.read_bytes() == whole.read_bytes()
    assert sorted(path.name for path in out.parent.glob("out*")) == [out.name, f"{out.name}.run"]
    count = len(embedders)
    assert embed("model", source, "-o", out, "--resume") == 0 and len(embedders) == count, "nothing is left to do"


def test_more_texts_are_added_at_the_end(embedders: Opened, source: Path, out: Path) -> None:
    assert embed("model", source, "-o", out) == 0
    source.write_text(LINES + '{"text": "four"}\n')
    assert embed("model", source, "-o", out, "--resume") == 0
    assert embedders[-1].asked == [("four",)] and np.array_equal(vectors_in(out), expected((*TEXTS, "four")))


def test_a_run_with_other_settings_does_not_go_on(
    embedders: Opened, source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = source.with_name("out.npy")
    assert embed("model", source, "-o", out) == 0
    before = out.read_bytes()
    for model, change, what in (
        ("model", ("--prompt", "query"), "prompt"),
        ("model", ("--dimensions", "4"), "dimensions"),
        ("model", ("--truncate",), "truncate"),
        ("model", ("--kv-bits", "8"), "kv_bits"),
        ("other", (), "model"),
    ):
        assert embed(model, source, "-o", out, "--resume", *change) == 1
        assert f"written with another {what}" in capsys.readouterr().err
    assert out.read_bytes() == before and len(embedders) == 1


def test_texts_that_were_cut_off_elsewhere_do_not_go_on(
    embedders: Opened, source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model's longest text can be what the KV memory holds, so it is another on another machine."""
    out = source.with_name("out.jsonl")
    source.write_text("".join(LINES.splitlines(True)[:2]))
    assert embed("model", source, "-o", out, "--truncate") == 0
    source.write_text(LINES)
    with monkeypatch.context() as patch:
        patch.setattr(numbers, "INFO", replace(INFO, max_tokens=32))
        assert embed("model", source, "-o", out, "--truncate", "--resume") == 1
    assert "written with another longest_text" in capsys.readouterr().err
    assert embed("model", source, "-o", out, "--truncate", "--resume") == 0
    assert np.array_equal(vectors_in(out), expected(TEXTS))


def test_another_input_does_not_go_on(
    embedders: Opened, source: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert embed("model", source, "-o", out) == 0
    source.write_text(LINES.replace("two", "deux"))
    assert embed("model", source, "-o", out, "--resume") == 1
    assert "row 2 of" in capsys.readouterr().err
    source.write_text(LINES.splitlines()[0])
    assert embed("model", source, "-o", out, "--resume") == 1
    assert "it has 1 texts" in capsys.readouterr().err
    assert embed("model", source, "-o", out, "--force") == 0 and len(vectors_in(out)) == 1


def test_an_input_without_texts_makes_a_file_without_rows(embedders: Opened, tmp_path: Path, out: Path) -> None:
    source = tmp_path / "empty"
    source.write_text("\n \n")
    assert embed("model", source, "-o", out) == 0
    assert vectors_in(out).shape == (0, INFO.dimensions)


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("IN",), 2, "give an embedding model"),
        (("model", "IN", "more"), 2, "MODEL and IN are two"),
        (("model", "missing"), 1, "No such file"),
        (("model", "IN", "-o", "out.csv"), 1, "is named like a table"),
        (("model", "IN", "-o", "IN"), 1, "is both input and output"),
        (("model", "IN", "-o", "no/out.npy"), 1, "no folder"),
        (("model", "IN", "--resume"), 2, "--resume needs -o OUT"),
        (("model", "IN", "-o", "out.npy", "--resume", "--force"), 2, "give one of them"),
        (("model", "IN", "--prompt", "quer"), 1, "did you mean 'query'"),
        (("model", "IN", "--dimensions", "0"), 2, "--dimensions"),
        (("model", "IN", "--dimensions", "99"), 1, "the model's vectors have 16"),
        (("model", "model.npy", "-o", "out.npy"), 1, "No such file"),
    ],
)
def test_wrong_use_is_told(
    embedders: Opened,
    source: Path,
    arguments: tuple[str, ...],
    code: int,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(source.parent)
    assert embed(*(str(source) if each == "IN" else each for each in arguments)) == code
    err = capsys.readouterr().err
    assert says in " ".join(err.split()) and "Traceback" not in err
    assert sorted(path.name for path in source.parent.iterdir() if path.is_file()) == [source.name]


def test_a_model_that_is_none_for_embeddings_is_refused(
    fakes: Fakes, source: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert embed("model", source, "-o", out) == 1
    assert "fake is no embedding model" in capsys.readouterr().err and not out.exists()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("out.npy", b"\x93NUMPY\x01\x00" + b"junk" * 40),
        ("out.npy", b"no array"),
        ("out.npy", make_header(0, 0)),
        ("out.jsonl", b'{"id": 1}\n{"other": 2}\n{"id": 3}\n'),
    ],
)
def test_somebody_elses_file_is_not_gone_on_with(
    embedders: Opened, source: Path, name: str, content: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    out = source.with_name(name)
    assert embed("model", source, "-o", out) == 0
    out.write_bytes(content)
    assert embed("model", source, "-o", out, "--resume") == 1
    assert "--force starts again" in capsys.readouterr().err and out.read_bytes() == content
    run_file = out.with_name(out.name + ".run")
    run_file.unlink()
    assert embed("model", source, "-o", out, "--resume") == 1 and not run_file.exists()
