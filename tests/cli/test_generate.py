"""`cortexmlx generate`, with an engine that needs no model: what it prints where, and how it ends."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from cortexmlx.cli.start import run
from support import cli_fakes
from support.cli_fakes import Fakes, fake_engines  # noqa: F401  (a fixture)

FAKE_COMMAND = [sys.executable, cli_fakes.__file__]


class Pipe(io.TextIOWrapper):
    """Standard input as a pipe that holds `data`."""

    def __init__(self, data: bytes) -> None:
        read, write = os.pipe()
        os.write(write, data)
        os.close(write)
        super().__init__(os.fdopen(read, "rb"))


def test_text_goes_to_stdout_and_nothing_to_stderr_in_a_pipe(fakes: Fakes, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", "fake", "-p", "hello there"]) == 0
    assert capsys.readouterr() == ("You said: hello there\n", "")


def test_json_is_one_object_with_the_promised_keys(fakes: Fakes, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", "fake", "-p", "hello there", "--max-tokens", "3", "--temp", "0", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "text": "You said: hello",
        "token_ids": [0, 1, 2],
        "finish_reason": "length",
        "usage": {"prompt_tokens": 5, "completion_tokens": 3, "cached_tokens": 2, "total_tokens": 8},
        "timings": {
            "queued": 0.0,
            "ttft": 0.012,
            "total": 0.5,
            "prefill_tokens_per_second": 500.0,
            "decode_tokens_per_second": 40.0,
        },
    }


def test_prompt_goes_through_the_chat_template_unless_raw_or_there_is_none(fakes: Fakes) -> None:
    run(["generate", "fake", "-p", "hi", "--system", "Be brief."])
    assert fakes.engine.seen[0][0] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    run(["generate", "fake", "-p", "hi", "--raw"])
    assert fakes.engine.seen[0][0] == "hi"
    fakes.info = replace(fakes.info, chat_template=False)
    run(["generate", "fake", "-p", "hi"])
    assert fakes.engine.seen[0][0] == "hi"


def test_a_system_prompt_for_a_model_without_template_is_refused(
    fakes: Fakes, capsys: pytest.CaptureFixture[str]
) -> None:
    fakes.info = replace(fakes.info, chat_template=False)
    assert run(["generate", "fake", "-p", "hi", "--system", "Be brief."]) == 1
    assert capsys.readouterr().err == (
        "error: fake has no chat template, so --system has no place: put it into the prompt\n"
    )


def test_options_reach_the_engine_under_their_usual_names(fakes: Fakes) -> None:
    line = (
        "generate -m fake -p hi --max-tokens 7 --temp 0.5 --top-p 0.9 --top-k 40 --min-p 0.1 --seed 3 --stop a --stop b"
    )
    more = "--repetition-penalty 1.1 --presence-penalty 0.2 --frequency-penalty 0.3 --kv-memory 1GiB --block-size 16"
    assert run([*line.split(), *more.split(), "--attention", "reference"]) == 0
    (_, params), options = fakes.engine.seen[0], fakes.engine.options
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k, params.min_p) == (7, 0.5, 0.9, 40, 0.1)
    assert (params.seed, params.stop, params.repetition_penalty) == (3, ("a", "b"), 1.1)
    assert (params.presence_penalty, params.frequency_penalty) == (0.2, 0.3)
    assert (options.model, options.kv_memory, options.block_size, options.attention) == ("fake", 2**30, 16, "reference")


def test_what_is_piped_in_comes_before_the_argument(fakes: Fakes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", Pipe(b"the notes\n"))
    run(["generate", "fake", "--raw", "-p", "Summarise."])
    assert fakes.engine.seen[0][0] == "the notes\n\nSummarise."


def test_dash_reads_stdin_where_it_stands(fakes: Fakes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", Pipe(b"\xef\xbb\xbfthe notes"))
    run(["generate", "fake", "--raw", "-p", "Summarise:", "-p", "-"])
    assert fakes.engine.seen[0][0] == "Summarise:\n\nthe notes"


def test_nul_and_broken_utf8_become_replacement_characters_with_a_note(
    fakes: Fakes, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", Pipe(b"a\0b \xff \xe2\x82 \xef\xbf\xbd"))
    run(["generate", "fake", "--raw", "-p", "-", "-p", "caf\udcc3\udca9 \udcff"])
    assert fakes.engine.seen[0][0] == "a�b � � �\n\ncafé �"
    assert capsys.readouterr().err == (
        "cortexmlx: 3 x NUL or broken UTF-8 in stdin, replaced by �\n"
        "cortexmlx: 1 x NUL or broken UTF-8 in the prompt, replaced by �\n"
    )


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("generate fake", "no prompt"),
        ("generate fake -m other -p hi", "two models: 'fake' and --model 'other'"),
        ("generate fake -p hi --temp -1", "temperature is -1.0, but must be a number in [0, 100]"),
        ("generate fake -p hi --temp nan", "temperature is nan"),
        ("generate fake -p hi --top-p 0", "top_p is 0.0, but must be a number in (0, 1]"),
        ("generate fake -p hi --max-tokens 0", "max_tokens is 0"),
        ("generate fake -p hi --max-tokens many", "Invalid value for '--max-tokens'"),
        ("generate fake -p hi --kv-memory lots", "'lots' is not a size: write 4GB"),
        ("generate fake -p hi --raw --system x", "--system needs the chat template"),
        ("generate fake -p hi --no-such-option", "--no-such-option"),
        ("generat", "No such command 'generat'"),
    ],
)
def test_wrong_usage_exits_2_and_names_the_option(
    line: str, says: str, fakes: Fakes, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(line.split()) == 2
    out, err = capsys.readouterr()
    assert out == "" and says in " ".join(err.split()) and "Traceback" not in err


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (
            "generate missing -p hi",
            "error: no model 'missing': no such folder or .gguf file, and not a hub id (org/name).\n",
        ),
        (
            "generate fake -p !fail",
            "error: prompt has 9120 tokens, the cache holds 8192: raise --kv-memory or shorten it\n",
        ),
        (
            "generate broken -p hi",
            "error: unexpected RuntimeError: a bug. Run it again with --debug for the traceback.\n",
        ),
    ],
)
def test_an_error_is_one_line_and_exit_code_1(
    line: str, says: str, fakes: Fakes, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(line.split()) == 1
    assert capsys.readouterr().err == says


def test_debug_anywhere_on_the_line_shows_the_traceback(fakes: Fakes, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", "missing", "-p", "hi", "--debug"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("Traceback") and "ModelNotFound" in err


def test_ctrl_c_keeps_the_text_so_far_and_exits_130() -> None:
    process = subprocess.Popen([*FAKE_COMMAND, "generate", "fake", "-p", "!slow"], stdout=-1, stderr=-1, stdin=-3)
    assert process.stdout is not None
    start = process.stdout.read(5)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=10)
    assert (start, process.returncode, err) == (b"word0", 130, b"")
    assert out.startswith(b" word1") or out == b"\n"


def test_ctrl_c_with_json_prints_the_partial_answer(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    command = [*FAKE_COMMAND, "generate", "fake", "-p", "!slow", "--json"]
    process = subprocess.Popen(command, stdout=-1, stdin=-3, env={**os.environ, "FAKE_BEGUN": str(begun)})
    while not begun.exists():
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=10)
    assert process.returncode == 130
    answer = json.loads(out)
    assert answer["finish_reason"] == "cancelled" and answer["text"].startswith("word0 word1 word2 word3")


def test_a_reader_that_goes_away_is_no_error() -> None:
    process = subprocess.Popen([*FAKE_COMMAND, "generate", "fake", "-p", "!slow"], stdout=-1, stderr=-1, stdin=-3)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.read(5)
    process.stdout.close()
    assert process.wait(timeout=10) == 141
    assert process.stderr.read() == b""


def test_a_terminal_that_cannot_show_a_character_gets_a_question_mark() -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [*FAKE_COMMAND, "generate", "fake", "-p", "né"], capture_output=True, env=environment, stdin=-3
    )
    assert (done.returncode, done.stdout) == (0, b"You said: n?\n")
