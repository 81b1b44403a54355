"""`cortexmlx eval`: what it prints, and how it ends with files that are no text."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from cortexmlx import Engine, Perplexity
from cortexmlx.cli import eval as command
from cortexmlx.cli.start import run

TEXT = "the cat and the hat, and then a tale of the sea. " * 40
OPTIONS = ["--context", "32", "--stride", "20", "--kv-memory", "256KB", "--block-size", "8"]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def test_json_has_what_the_library_says(tiny: Any, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["eval", str(tiny("llama")), str(file), *OPTIONS, "--json"]) == 0
    out, err = capsys.readouterr()
    told = json.loads(out)
    with Engine(tiny("llama"), kv_memory="256KB", block_size=8) as engine:
        known = engine.perplexity(TEXT, context=32, stride=20)
    assert err == "" and told["complete"] and told["text_bytes"] == len(TEXT)
    for name in ("perplexity", "bits_per_token", "bits_per_byte", "nll"):
        assert math.isclose(told[name], getattr(known, name), rel_tol=1e-5)
    for name in ("tokens", "windows", "all_windows", "context", "stride", "computed_tokens", "text_tokens"):
        assert told[name] == getattr(known, name)


def test_a_page_for_people(tiny: Any, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["eval", "-m", str(tiny("llama")), str(file), *OPTIONS]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = ("perplexity", "bits per token", "bits per byte", "scored", "windows", "computed")
    assert [line[:16].strip() for line in lines] == list(names)
    with Engine(tiny("llama"), kv_memory="256KB", block_size=8) as engine:
        tokens = len(engine.encode(TEXT))
    assert lines[3].endswith(f"{tokens - 1:,} of {tokens:,} tokens, {len(TEXT):,} bytes")
    assert lines[4].endswith(" of 32 tokens, stride 20") and " so far" not in lines[0]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is empty: there is nothing to score"),
        (b"\xef\xbb\xbf \n", "is empty: there is nothing to score"),
        (b"a", "the text has 1 token: there is nothing to score"),
        (b"text\0more", "is no text: it has a NUL at byte 4"),
        (b"caf\xe9 au lait", "is no text in UTF-8: byte 3 is 0xe9"),
        (b"x" * 101, "has more than 100 B, which would take very long: score a part of it, such as"),
        (None, "No such file or directory"),
    ],
)
def test_what_is_no_text_is_one_message(
    data: bytes | None,
    message: str,
    tiny: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(command, "MAX_TEXT_BYTES", 100)
    path = tmp_path / "text"
    if data is not None:
        path.write_bytes(data)
    assert run(["eval", str(tiny("llama")), str(path), "--kv-memory", "256KB"]) == 1
    out, err = capsys.readouterr()
    assert out == "" and message in err and err.startswith("error: ") and err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["a", "b", "c"], 2, "3 arguments, but MODEL and FILE are two"),
        (["--context", "1"], 2, "greater than or equal to 2"),
        (["--context", "9999"], 1, "context is 9999, but must be in 2.."),
        (["--context", "8", "--stride", "9"], 1, "stride is 9, but must be in 1..7"),
        (["."], 1, "Is a directory"),
    ],
)
def test_wrong_use(
    arguments: list[str], code: int, message: str, tiny: Any, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = [] if arguments[0] in ("a", ".") else [str(file)]
    assert run(["eval", "-m", str(tiny("llama")), *source, *arguments, "--kv-memory", "256KB"]) == code
    assert message in " ".join(capsys.readouterr().err.replace("│", " ").split())


def test_an_interrupt_gives_what_is_known_so_far(
    tiny: Any, file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, last = Engine.perplexity, 5

    def interrupted(*self: Any, on_window: Any, **options: Any) -> Any:
        def told(known: Any) -> None:
            if last:
                on_window(known)
            if known.windows >= last:
                raise KeyboardInterrupt

        return whole(*self, on_window=told, **options)

    monkeypatch.setattr(Engine, "perplexity", interrupted)
    assert run(["eval", str(tiny("llama")), str(file), *OPTIONS, "--json"]) == 130
    told = json.loads(capsys.readouterr().out)
    assert (told["windows"], told["complete"]) == (5, False) and told["tokens"] == 31 + 4 * 20
    assert run(["eval", str(tiny("llama")), str(file), *OPTIONS]) == 130
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith(" so far") and lines[4].startswith("windows         5 of ")
    last = 0
    assert run(["eval", str(tiny("llama")), str(file), *OPTIONS]) == 130
    assert "stopped before the first window was scored: nothing is known yet" in capsys.readouterr().err


def test_the_time_left_is_told_once_it_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    monkeypatch.setattr(command.console, "is_terminal", lambda stream: True)
    monkeypatch.setattr("rich.progress.Progress.update", lambda *_, description, **__: shown.append(description))
    with command.progress_bar() as show:
        for windows in (1, 4, 8):
            show(Perplexity(1.0, 10, windows, 20, 16, 8, 10, 2.0 * windows, 11, 40))
    assert [each.partition("tok/s")[2] for each in shown] == ["", "", " · 24 s left"]


def test_a_text_that_a_model_never_writes_is_still_json(
    tiny: Any, file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hopeless = Perplexity(math.inf, 10, 1, 1, 16, 8, 10, 1.0, 11, 40)
    monkeypatch.setattr(Engine, "perplexity", lambda *_, on_window, **options: on_window(hopeless))
    assert run(["eval", str(tiny("llama")), str(file), "--json"]) == 0
    told = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert (told["perplexity"], told["nll"], told["tokens"]) == (None, None, 10)
