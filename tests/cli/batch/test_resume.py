"""`cortexmlx batch --resume`: an interrupted run goes on where it was, and never mixes two kinds of answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortexmlx.cli.batch.resume import RunIdentity, resume, start
from cortexmlx.cli.start import run
from cortexmlx.request import SamplingParams
from support.cli_fakes import Fakes, fake_engines  # noqa: F401  (a fixture)

IDENTITY = RunIdentity("fake", "-", None, False, SamplingParams())


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    source = tmp_path / "in.jsonl"
    source.write_text(
        "".join(json.dumps({"id": f"q{i}", "prompt": p}) + "\n" for i, p in enumerate(["a", "b", "!fail", "d"]))
    )
    return source, tmp_path / "out.jsonl"


def batch(files: tuple[Path, Path], *options: str) -> int:
    return run(["batch", "fake", str(files[0]), "-o", str(files[1]), *options])


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def asked(fakes: Fakes) -> list[str]:
    return [prompt[-1]["content"] for prompt, _ in fakes.engine.seen]


def test_only_what_is_missing_is_asked_and_a_torn_line_is_repaired(files: tuple[Path, Path], fakes: Fakes) -> None:
    assert batch(files) == 1
    whole = files[1].read_bytes()
    lines = whole.splitlines(keepends=True)
    files[1].write_bytes(lines[0] + lines[1][: len(lines[1]) // 2])
    assert batch(files, "--resume") == 1
    assert asked(fakes) == ["b", "!fail", "d"]
    assert files[1].read_bytes() == whole


def test_functions_are_no_part_of_what_a_run_was() -> None:
    params = IDENTITY.as_json()["params"]
    assert "temperature" in params and "logits_processors" not in params


def test_what_rows_keep_is_part_of_what_a_run_was(files: tuple[Path, Path], fakes: Fakes) -> None:
    batch(files, "--keep-last", "100")
    with_it = files[1].read_bytes()
    assert batch(files, "--resume") == 1 and files[1].read_bytes() == with_it
    assert batch(files, "--resume", "--keep-last", "100", "--keep-first", "4") == 0


def test_a_finished_run_asks_nothing(files: tuple[Path, Path], fakes: Fakes) -> None:
    batch(files)
    before = files[1].read_bytes()
    assert batch(files, "--resume") == 0
    assert asked(fakes) == [] and files[1].read_bytes() == before


def test_errors_are_asked_again_on_request(files: tuple[Path, Path], fakes: Fakes) -> None:
    batch(files)
    assert batch(files, "--resume", "--retry-errors") == 1
    assert asked(fakes) == ["!fail"]
    assert sorted(record["id"] for record in records(files[1])) == ["q0", "q1", "q2", "q3"]


def test_without_an_output_to_go_on_with_it_begins(files: tuple[Path, Path], fakes: Fakes) -> None:
    assert batch(files, "--resume") == 1
    assert len(records(files[1])) == 4


def test_without_resume_it_begins_again(files: tuple[Path, Path], fakes: Fakes) -> None:
    batch(files)
    batch(files, "--max-tokens", "1")
    assert [record.get("text") for record in records(files[1])] == ["You", "You", None, "You"]
    assert batch(files, "--resume", "--max-tokens", "1") == 0


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (["--temp", "0.5"], "temperature"),
        (["--max-tokens", "3", "--seed", "1"], "max_tokens and seed"),
        (["--system", "Be brief."], "system"),
        (["--raw"], "raw"),
        (["--adapter", "tuned"], "adapter"),
        (["--kv-bits", "4"], "kv_bits"),
        (["-m", "fake"], None),
    ],
)
def test_another_kind_of_run_is_refused_with_what_differs(
    options: list[str], what: str | None, files: tuple[Path, Path], fakes: Fakes, capsys: pytest.CaptureFixture[str]
) -> None:
    batch(files)
    before = files[1].read_bytes()
    capsys.readouterr()
    assert batch(files, "--resume", *options) == (1 if what else 0)
    said = f"error: out.jsonl was written with another {what}: use the same, or leave out --resume to begin again\n"
    assert what is None or capsys.readouterr().err.endswith(said)
    assert files[1].read_bytes() == before


def test_an_output_of_unknown_origin_is_refused(
    files: tuple[Path, Path], fakes: Fakes, capsys: pytest.CaptureFixture[str]
) -> None:
    files[1].write_text('{"id": "q0"}\n')
    assert batch(files, "--resume") == 1
    assert "out.jsonl.run is missing, so it is not known what out.jsonl holds" in capsys.readouterr().err


@pytest.mark.parametrize("options", [["--resume"], ["-o", "out", "--retry-errors"]])
def test_resume_needs_an_output_and_retrying_needs_resume(
    options: list[str], files: tuple[Path, Path], fakes: Fakes
) -> None:
    assert run(["batch", "fake", str(files[0]), *options]) == 2


@given(st.integers(0, 200))
def test_wherever_a_file_is_torn_whole_records_stay(tmp_path_factory: pytest.TempPathFactory, at: int) -> None:
    output = tmp_path_factory.mktemp("torn") / "out"
    lines = [json.dumps({"id": i, "text": "é" * i}, ensure_ascii=False).encode() + b"\n" for i in range(6)]
    output.write_bytes(b"".join(lines)[:at])
    start(output, IDENTITY)
    done = resume(output, IDENTITY, retry_errors=False)
    whole = [n for n in range(6) if sum(map(len, lines[: n + 1])) <= at]
    assert sorted(done) == whole and output.read_bytes() == b"".join(lines[n] for n in whole)


def test_resume_may_stand_anywhere_on_the_line(fakes: Fakes, tmp_path: Path) -> None:
    (tmp_path / "in").write_text("a\nb\n")
    line = ["batch", "fake", str(tmp_path / "in"), "-o", str(tmp_path / "out")]
    assert run(line) == 0
    answers = (tmp_path / "out").read_bytes()
    for place in range(1, len(line) + 1):
        for options in (["--resume"], ["--resume", "--retry-errors"]):
            if place != 4:  # between -o and its value
                assert run([*line[:place], *options, *line[place:]]) == 0, place
                assert (tmp_path / "out").read_bytes() == answers
