"""`cortexmlx batch` from file to file, with an engine that needs no model."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from cortexmlx.cli import engine as engines
from cortexmlx.cli.batch import command as batch_command
from cortexmlx.cli.batch.command import BatchStatusLine
from cortexmlx.cli.batch.files import BatchWriter, RecordStream
from cortexmlx.cli.batch.input import RequestIds, read_ids
from cortexmlx.cli.batch.run import BatchRun
from cortexmlx.cli.start import run
from cortexmlx.core.config import EngineConfig
from cortexmlx.errors import EngineClosed
from cortexmlx.protocols.batch import BatchRequest, LineStyle, RecordBuilder
from cortexmlx.protocols.request import Request
from cortexmlx.types.sampling_params import SamplingParams
from support.cli import cli_fakes
from support.cli.cli_fakes import FakeEngine, Fakes
from support.models.tiny import write_tiny
from support.patience import PATIENCE, soon

FAKE_COMMAND = [sys.executable, cli_fakes.__file__]


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return tmp_path / "in.jsonl"


def test_simple_records_in_input_order_with_a_summary_on_stderr(
    fakes: Fakes, source: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source.write_text('{"id": "slow", "prompt": "!long", "max_tokens": 40}\n{"prompt": "né", "max_tokens": 2}\n')
    assert run(["batch", "fake", str(source), "-o", str(out)]) == 0
    slow, quick = records(out)
    assert (slow["id"], slow["finish_reason"], slow["usage"]["completion_tokens"]) == ("slow", "length", 40)
    assert (quick["id"], quick["text"], quick["finish_reason"]) == (2, "You said:", "length")
    assert (quick["usage"]["prompt_tokens"], quick["usage"]["total_tokens"]) == (4, 6)
    stdout, stderr = capsys.readouterr()
    assert stdout == "" and stderr.startswith("cortexmlx: 2 answered, 0 failed, 278 tokens in ")


def test_an_answer_that_ends_before_its_form_is_whole_has_a_note(
    fakes: Fakes, source: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In each format of records, and for a line's own form. It is no error: the record is there."""
    free, whole = {"id": "free", "prompt": "!long", "max_tokens": 2}, {"prompt": "!say {}"}
    cut = {"prompt": "!say { }", "max_tokens": 1, "n": 2}
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "!say { }"}], "max_tokens": 1}
    body["response_format"] = {"type": "json_object"}
    own = {"custom_id": "own", "url": "/v1/chat/completions", "body": body}
    source.write_text("\n".join(map(json.dumps, (whole, cut, own))))
    assert run(["batch", "fake", str(source), "-o", str(out), "--schema", "json"]) == 0
    whole, cut, own = records(out)
    note = ["the answer ends before the form is whole: max_tokens ended it"]
    assert "notes" not in whole and cut["notes"] == cut["others"][0]["notes"] == note
    assert own["response"]["body"]["choices"][0]["notes"] == note
    said = "which, and --resume --retry-errors asks again, with a larger -n or max_tokens of the line"
    assert f"3 answers end before the form is whole: `notes` in OUT says {said}\n" in capsys.readouterr().err
    source.write_text(json.dumps(free))
    assert run(["batch", "fake", str(source), "-o", str(out), "--force"]) == 0
    assert "notes" not in records(out)[0] and "form" not in capsys.readouterr().err


def test_a_schema_that_cannot_be_enforced_is_refused_once_and_before_out_is_begun(
    source: Path, out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    line = ["batch", str(write_tiny(tmp_path / "m")), str(source), "-o", str(out), "--schema", '{"contains": {}}']
    assert run(line) == 1 and not out.exists()
    err = capsys.readouterr().err
    assert err.count("this schema cannot be enforced: Unimplemented keys") == 1 and "Leave that out, as" in err


def test_answers_whose_form_was_cut_are_asked_again_with_more_tokens(
    fakes: Fakes, source: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source.write_text('!say {}\n!say { "a": 1 }\n')
    line = ["batch", "fake", str(source), "-o", str(out), "--format", "lines", "--schema", "json", "-n"]
    assert run([*line, "2"]) == 0 and ["notes" in record for record in records(out)] == [False, True]
    assert run([*line, "99", "--resume"]) == 1
    said = "--retry-errors to ask again what failed or ended before its form was whole, or "
    assert f"(max_tokens was 2, now 99): use the same, {said}" in capsys.readouterr().err
    assert run([*line, "99", "--resume", "--retry-errors"]) == 0
    assert [record["text"] for record in records(out)] == ["{}", '{ "a": 1 }'] and len(fakes.engine.seen) == 2


def test_openai_records_have_the_shape_of_the_openai_batch_api_and_it_is_said_who_answered(
    fakes: Fakes, source: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = {"model": "gpt-3.5-turbo-0125", "messages": [{"role": "user", "content": "hi"}]}
    lines = [
        {"custom_id": "c1", "method": "POST", "url": "/v1/chat/completions", "body": body},
        {"custom_id": "c2", "method": "POST", "url": "/v1/completions", "body": {"prompt": "hi", "n": 2}},
    ]
    source.write_text("\n".join(map(json.dumps, lines)))
    assert run(["batch", "fake", str(source), "-o", str(out)]) == 0
    chat, text = records(out)
    body = chat["response"]["body"]
    assert (chat["id"], chat["custom_id"], body["id"], body["model"]) == ("batch_req_1", "c1", "chatcmpl-1", "fake")
    assert body["created"] > 1_700_000_000 and body["usage"]["total_tokens"] == 7 and chat["error"] is None
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "You said: hi"}
    choices = text["response"]["body"]["choices"]
    assert [(c["index"], c["text"]) for c in choices] == [(0, "You said: hi"), (1, "You said: hi")]
    assert text["response"]["body"]["usage"]["completion_tokens"] == 6
    assert [prompt for prompt, _ in fakes.engine.seen] == [[{"role": "user", "content": "hi"}], "hi"]
    assert "cortexmlx: requests name 'gpt-3.5-turbo-0125': fake was asked\n" in capsys.readouterr().err


def test_bad_lines_and_failed_requests_are_records_and_exit_code_1(
    fakes: Fakes, source: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source.write_text(
        '{"prompt": "a"}\n{oops\n{"id": 7, "prompt": "!fail"}\n{"id": "", "prompt": ""}\n{"prompt": "b"}\n'
        '{"prompt": "!full"}\n'
    )
    assert run(["batch", "fake", str(source), "-o", str(out)]) == 1
    first, broken, failed, empty, last, full = records(out)
    assert (first["text"], last["text"]) == ("You said: a", "You said: b")
    assert broken["error"]["line"] == 2 and broken["error"]["message"].endswith("in double quotes at column 2")
    message = "prompt has 9120 tokens, the cache holds 8192: raise --kv-memory or shorten it"
    assert failed == {"id": 7, "error": {"code": "invalid_request", "message": message, "line": 3}}
    assert empty["error"] == {"code": "invalid_request", "message": "the prompt is empty", "line": 4}
    assert full["error"]["code"] == "KVCacheFull"
    told = capsys.readouterr().err.splitlines()
    assert told[0].startswith("cortexmlx: 2 answered, 4 failed")
    assert told[1] == f"cortexmlx: line 2: {broken['error']['message']}" and "not JSON: " in told[1]
    assert told[2:] == [
        f"cortexmlx: line 3: {message}",
        "cortexmlx: line 4: the prompt is empty",
        f"cortexmlx: and 1 more: each record in {out} has its error",
    ]


def test_unordered_writes_whatever_finishes_first(fakes: Fakes, source: Path, out: Path) -> None:
    source.write_text('{"id": "long", "prompt": "!long"}\n{"id": "short", "prompt": "hi"}\n')
    assert run(["batch", "fake", str(source), "-o", str(out), "--unordered"]) == 0
    assert [r["id"] for r in records(out)] == ["short", "long"]


def test_plain_lines_from_stdin_to_stdout_through_the_template(
    fakes: Fakes, piped: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert piped("one\ntwo\n", "batch", "-m", "fake", "-", "-o", "-", "--system", "Be brief.") == 0
    assert [path.name for path in tmp_path.iterdir()] == ["in"], "- is no name of a file"
    said = [json.loads(line)["text"] for line in capsys.readouterr().out.splitlines()]
    assert said == ["You said: one", "You said: two"]
    assert fakes.engine.seen[1][0] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "two"}]


@pytest.mark.parametrize(
    ("option", "variables"),
    [
        ("--no-think", {"enable_thinking": False}),
        ("--template-var=reasoning_effort=low", {"reasoning_effort": "low"}),
    ],
)
def test_the_chat_templates_variables_are_set_for_all_that_do_not_say_themselves(
    option: str, variables: dict[str, Any], fakes: Fakes, source: Path, out: Path
) -> None:
    source.write_text('{"prompt": "a"}\n{"prompt": "b", "chat_template_kwargs": {"enable_thinking": true}}\n')
    assert run(["batch", "fake", str(source), "-o", str(out), option]) == 0
    own = {**variables, "enable_thinking": True}
    assert [prompt.template_vars for prompt, _ in fakes.engine.seen] == [variables, own]


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        (["--template-var", "colour=red"], 1, "does not read colour, so that would change nothing"),
        (["--no-think", "--raw"], 2, "--raw leaves out"),
        (["--template-var", "x"], 2, "'x' is not NAME=VALUE"),
    ],
)
def test_variables_that_change_nothing_end_the_run_before_a_record_is_written(
    options: list[str], code: int, says: str, fakes: Fakes, source: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    assert run(["batch", "fake", str(source), "-o", str(out), *options]) == code
    err = " ".join(capsys.readouterr().err.split())
    assert says in err and not out.exists() and err.lower().count("error") == 1


def test_a_huge_input_is_read_only_as_fast_as_it_is_answered(fakes: Fakes, out: Path, source: Path) -> None:
    source.write_text("".join(f'{{"prompt": "{i}"}}\n' for i in range(300)))
    assert run(["batch", "fake", str(source), "-o", str(out), "--max-rows", "3"]) == 0
    assert [r["text"] for r in records(out)] == [f"You said: {i}" for i in range(300)]
    assert 3 < fakes.engine.most_in_flight <= 12


def test_a_name_that_two_lines_have_is_refused_before_anything_is_loaded(
    fakes: Fakes, source: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source.write_text('{"id": "a", "prompt": "x"}\n{"id": "b", "prompt": "y"}\n{"id": "a", "prompt": "z"}\n')
    for options in ([], ["--resume"]):
        assert run(["batch", "fake", str(source), "-o", str(out), *options]) == 1
        assert "error: lines 1 and 3 both have the id 'a': " in capsys.readouterr().err
        assert fakes.opened == [] and not out.exists()


def test_an_answer_is_there_before_the_next_line_of_a_pipe() -> None:
    with subprocess.Popen([*FAKE_COMMAND, "batch", "fake", "-"], stdin=-1, stdout=-1, stderr=-1) as process:
        assert process.stdin is not None and process.stdout is not None
        for said in ("one", "two"):
            process.stdin.write(b'{"prompt": "%b"}\n' % said.encode())
            process.stdin.flush()
            assert json.loads(process.stdout.readline())["text"] == f"You said: {said}"
        process.stdin.write(b'{"prompt": "three"}')
        process.stdin.close()
        assert json.loads(process.stdout.read())["id"] == 3
    assert process.returncode == 0


def test_a_name_that_comes_twice_through_a_pipe_ends_the_run(
    fakes: Fakes, out: Path, piped: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    text = '{"id": "a", "prompt": "x"}\n{"id": "a", "prompt": "z"}\n'
    assert piped(text, "batch", "fake", "-", "-o", str(out)) == 1
    err = capsys.readouterr().err
    assert err.count("error: ") == 1 and "error: lines 1 and 2 both have the id 'a': " in err
    assert "z" not in out.read_text()


def test_a_name_that_comes_again_in_a_file_that_grows_ends_the_run(
    fakes: Fakes, source: Path, out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two records had one id, and --resume refused them."""
    source.write_text('{"id": "a", "prompt": "x"}\n')

    def read_before_it_grows(*arguments: Any) -> RequestIds | None:
        ids = read_ids(*arguments)
        source.write_text('{"id": "a", "prompt": "x"}\n{"id": "b", "prompt": "y"}\n{"id": "a", "prompt": "z"}\n')
        return ids

    monkeypatch.setattr(batch_command, "read_ids", read_before_it_grows)
    assert run(["batch", "fake", str(source), "-o", str(out)]) == 1
    assert "error: lines 1 and 3 both have the id 'a': " in capsys.readouterr().err
    assert "z" not in out.read_text()


def test_a_line_of_ten_megabytes_is_one_of_the_others(fakes: Fakes, source: Path, out: Path) -> None:
    long = "a" * 10_000_000
    source.write_text(
        f'{{"id": 1, "prompt": "{long}", "max_tokens": 1}}\n{{"id": 2, "prompt": "b"}}\n{{"id": 3, "x": "{long}"}}\n'
    )
    assert run(["batch", "fake", str(source), "-o", str(out)]) == 1
    assert [record.get("text") for record in records(out)] == ["You", "You said: b", None]


def test_a_device_that_is_full_ends_the_run_with_one_message(
    fakes: Fakes, source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    assert run(["batch", "fake", str(source), "-o", "/dev/full"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("cortexmlx: 0 answered, 0 failed"), "it was not written"
    assert err.count("error: ") == 1 and "error: /dev/full cannot be written: No space left on device" in err
    assert not Path("/dev/full.run").exists()


def test_a_disk_that_fills_up_ends_the_run_with_one_message_and_nothing_is_lost(
    fakes: Fakes, source: Path, out: Path
) -> None:
    """A limit on the size of files stands for the disk: what does not fit is refused in the middle of a record."""
    source.write_text("".join(f'{{"id": {i}, "prompt": "{i}"}}\n' for i in range(60)))
    command = [*FAKE_COMMAND, "batch", "fake", str(source), "-o", str(out)]
    limited = ["bash", "-c", "trap '' XFSZ; ulimit -f 4; exec \"$@\"", "bash", *command]
    full = subprocess.run(limited, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True)
    assert full.returncode == 1 and full.stderr.count("error: ") == 1, full.stderr
    assert f"error: {out} cannot be written: File too large; what it holds stays, and with --resume" in full.stderr
    kept = records(out)
    assert 10 < len(kept) < 60 and out.stat().st_size <= 4096
    assert run(["batch", "fake", str(source), "-o", str(out), "--resume"]) == 0
    assert [record["id"] for record in records(out)] == list(range(60))


@pytest.mark.parametrize("content", [b"", b"\n \n\r\n"])
def test_an_input_without_requests_is_said_and_loads_nothing(
    content: bytes, fakes: Fakes, source: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source.write_bytes(content)
    assert run(["batch", "fake", str(source), "-o", str(out)]) == 0
    assert capsys.readouterr() == ("", f"cortexmlx: {source} has no requests\n")
    assert out.read_bytes() == b"" and fakes.opened == []
    source.write_text('{"prompt": "a"}')
    assert run(["batch", "fake", str(source), "-o", str(out), "--resume"]) == 0
    assert [record["text"] for record in records(out)] == ["You said: a"]


def test_what_editors_do_to_a_file_does_not_matter(fakes: Fakes, source: Path, out: Path) -> None:
    """A byte order mark, the ends of lines of Windows, and none at the end."""
    source.write_bytes(b'\xef\xbb\xbf{"id": "a", "prompt": "one"}\r\n\r\n{"id": "", "prompt": "two"}')
    assert run(["batch", "fake", str(source), "-o", str(out)]) == 0
    assert {record["id"]: record["text"] for record in records(out)} == {"a": "You said: one", "": "You said: two"}


def test_ids_of_any_kind_are_told_apart_and_a_huge_one_makes_no_huge_message(
    fakes: Fakes, source: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ids: list[Any] = ["", 2**70, -1, "-1", "x" * 1_000_000]
    source.write_text("".join(json.dumps({"id": each, "prompt": "a"}) + "\n" for each in ids))
    assert run(["batch", "fake", str(source), "-o", str(out)]) == 0
    assert [record["id"] for record in records(out)] == ids
    source.write_text(source.read_text().replace('"a"', '"b"').replace("-1,", "-2,", 1))
    capsys.readouterr()
    assert run(["batch", "fake", str(source), "-o", str(out), "--resume"]) == 1
    source.write_text(2 * (json.dumps({"id": ids[-1], "prompt": "a"}) + "\n"))
    assert run(["batch", "fake", str(source), "--force", "-o", str(out)]) == 1
    said = capsys.readouterr().err
    assert said.count("error: ") == 2 and "lines 1 and 2 both have the id 'xxx" in said and len(said) < 1000
    source.write_text('{"id": 1.5, "prompt": "a"}\n{"id": [1], "prompt": "a"}\n{"id": true, "prompt": "a"}\n')
    assert run(["batch", "fake", str(source), "--force", "-o", str(out)]) == 1
    for record, shown in zip(records(out), ("1.5", "[1]", "True"), strict=True):
        assert record["error"]["message"] == f"id is {shown}, but must be a text or an integer"


def test_token_ids_that_the_model_does_not_have_are_an_error_of_their_record(
    fakes: Fakes, source: Path, out: Path
) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "logit_bias": {"70000": -100, "5": 1, "1000": 1}}
    lines = [
        {"id": 1, "prompt": "a", "stop_token_ids": [999, 1000]},
        {"custom_id": "c", "url": "/v1/chat/completions", "body": body},
        {"id": 3, "prompt": "b", "stop_token_ids": [999]},
    ]
    source.write_text("\n".join(map(json.dumps, lines)))
    assert run(["batch", "fake", str(source), "-o", str(out)]) == 1
    stops, biases, answered = records(out)
    says = "stop_token_ids names the token id 1000, but must be a list of at most 16,384 token ids in 0..999"
    assert stops["error"] == {"code": "invalid_request", "message": says, "line": 1}
    assert biases["error"]["message"].startswith("logit_bias names the token id 70000 and 1 more like it, but must be")
    assert answered["text"] == "You said: b"


def test_stdout_is_stdout_under_each_of_its_names(
    fakes: Fakes, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source.write_text('{"prompt": "a"}\n{oops\n')
    monkeypatch.chdir(tmp_path)
    for options in ([], ["-o", "-"], ["-o", "/dev/stdout"], ["--errors", "-"], ["--errors", "/dev/stdout", "-o", "-"]):
        assert run(["batch", "fake", str(source), *options]) == 1
        assert [json.loads(line)["id"] for line in capsys.readouterr().out.splitlines()] == [1, None]
    assert run(["batch", "fake", str(source), "-o", "out", "--errors", "-"]) == 1
    assert json.loads(capsys.readouterr().out)["error"]["line"] == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out", "out.run"]


def test_who_stops_reading_ends_the_run_without_a_word_of_it(source: Path) -> None:
    source.write_text("".join(f'{{"prompt": "{i}"}}\n' for i in range(2_000)))
    process = subprocess.Popen([*FAKE_COMMAND, "batch", "fake", str(source)], stdout=-1, stderr=-1, stdin=-3)
    assert process.stdout is not None and process.stderr is not None
    assert json.loads(process.stdout.readline())["text"] == "You said: 0"
    process.stdout.close()
    assert process.wait(PATIENCE) == 141 and b"rror" not in process.stderr.read()


@pytest.mark.parametrize(
    ("line", "code", "says"),
    [
        ("batch fake {tmp}/none.jsonl", 1, "error: No such file or directory: {tmp}/none.jsonl\n"),
        ("batch fake {tmp}/in.jsonl -o {tmp}", 1, "error: {tmp} is a folder: give -o a file\n"),
        ("batch fake {tmp}/in.jsonl -o {tmp}/no/out", 1, "error: no folder {tmp}/no to write out into\n"),
        ("batch fake {tmp}/in.jsonl -o {tmp}/in.jsonl", 1, "error: {tmp}/in.jsonl is both input and output: "),
        ("batch fake {tmp}/in.jsonl -o {tmp}/x --errors {tmp}/x", 1, "error: {tmp}/x is for answers and for errors"),
        ("batch fake {tmp}/in.jsonl -o /dev/null --resume", 1, "error: /dev/null is no file, so there is nothing to"),
        ("batch fake {tmp}/in.csv", 1, "error: {tmp}/in.csv is a table: batch reads JSONL"),
        ("batch missing {tmp}/in.jsonl", 1, "error: no model 'missing'"),
        ("batch a b c", 2, "3 arguments, but MODEL and IN are two"),
        ("batch", 2, "Missing argument"),
        ("batch org/model", 2, "org/model is no file. If it is the model: `"),
        ("batch {tmp}/in.jsonl out", 2, "in.jsonl is no model: type `"),
        ("batch fake {tmp}/in.jsonl --json", 2, "No such option: --json (Possible options: --schema json)"),
        ("batch fake {tmp}/in.jsonl --format json", 2, "Error: Invalid value for '--format': 'json' is not one of"),
    ],
)
def test_unusable_files_are_refused_before_anything_is_loaded(
    line: str, code: int, says: str, fakes: Fakes, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source.write_text('{"prompt": "a"}\n')
    source.with_name("in.csv").write_text("prompt\na\n")
    assert run(line.format(tmp=tmp_path).split()) == code
    assert says.format(tmp=tmp_path) in capsys.readouterr().err
    assert fakes.opened == [] and source.read_text() == '{"prompt": "a"}\n'


def test_ctrl_c_keeps_what_has_finished_and_exits_130(source: Path, out: Path) -> None:
    source.write_text('{"prompt": "a"}\n{"id": "stuck", "prompt": "!slow"}\n{"prompt": "c"}\n')
    process = subprocess.Popen([*FAKE_COMMAND, "batch", "fake", str(source), "-o", str(out)], stderr=-1, stdin=-3)
    assert soon(lambda: out.exists() and out.read_text().count("\n") == 2)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert [r["id"] for r in records(out)] == [1, 3]
    assert err.startswith(b"cortexmlx: 2 answered, 0 failed")
    assert err.endswith(b"cortexmlx: 1 left: the same command with --resume goes on\n")


def test_ctrl_c_while_the_model_loads_says_that_nothing_was_begun(
    fakes: Fakes, source: Path, out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source.write_text('{"prompt": "a"}\n')
    monkeypatch.setattr(engines, "load_engine", Mock(side_effect=KeyboardInterrupt))
    monkeypatch.setattr(engines, "exit_immediately", Mock(side_effect=SystemExit(130)))
    assert run(["batch", "fake", str(source), "-o", str(out)]) == 130 and not out.exists()
    said = "cortexmlx: interrupted while the model was loading: no request was begun. The same command begins again\n"
    assert capsys.readouterr().err == said


# -- How far a batch is, in words: a line now and then in a log -------------------------------------------------------


def run_of(engine: Any, prompts: list[str]) -> BatchRun:
    params = SamplingParams(max_tokens=8)
    items = [BatchRequest(i, i, LineStyle.SIMPLE, Request((p,), params)) for i, p in enumerate(prompts, 1)]
    recorder = RecordBuilder("fake", 0, lambda token: b"")
    nothing = BatchWriter(RecordStream(Path(os.devnull)), RecordStream(Path(os.devnull)))
    return BatchRun(engine, items, nothing, lambda _, asked: asked, recorder, rows=1, in_order=True)


@pytest.mark.parametrize("total", [7, None])
def test_a_log_is_told_what_is_done_runs_and_is_left(
    total: int | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(batch_command, "LOG_SECONDS", 0.05)
    engine: Any = FakeEngine(EngineConfig("fake", max_rows=1))
    run = run_of(engine, ["a", "!fail", "!slow", "!slow"])
    with BatchStatusLine(engine, run, total=total, live=True, done_before=3):
        run.run()
    out, err = capsys.readouterr()
    assert out == "" and err, "nothing of it goes to the results"
    of, left = ("/7", r" · [\d:]+( s)? left") if total else ("", "")
    counts = rf"([3-7]){of} done( · 1 failed)? · (\d) running · (\d) waiting"
    line = rf"cortexmlx: {counts} · \d+ tok/s · KV 1 MiB of 2 GiB({left})?"
    assert all(re.fullmatch(line, said) for said in err.splitlines()), err
    assert ("left" in err) is (total is not None)
    for said in err.splitlines() if total else ():
        assert sum(int(n) for n in re.match(line, said).group(1, 3, 4)) == total  # type: ignore[union-attr]


@dataclass
class Run:
    """What is counted of one, which does nothing."""

    done_count: int
    failed_count: int
    last_answer_seconds: float
    seconds: float


def progress_of(run: Any, total: int, rows: int) -> BatchStatusLine:
    engine: Any = FakeEngine(EngineConfig("fake", max_rows=rows))
    return BatchStatusLine(engine, run, total=total, live=False)


def test_the_time_that_is_left_counts_down_until_the_next_one_is_done() -> None:
    """Four of eight were done after three seconds, as many as run at once: the others take three more."""

    run = Run(done_count=4, failed_count=0, last_answer_seconds=3.0, seconds=3.0)
    progress = progress_of(run, total=8, rows=4)
    told = []
    for run.seconds in (3.0, 5.0, 9.0):
        told.append(progress._status_text().rpartition(" · ")[2])
    assert told == ["3 s left", "1 s left", "0 s left"]


def test_what_fails_at_once_tells_nothing_of_the_time_that_is_left() -> None:
    """Three lines of thirty were no requests, and nothing was answered yet: that is no reason to say 0 s."""

    run = Run(done_count=3, failed_count=3, last_answer_seconds=0.0, seconds=10.0)
    progress = progress_of(run, total=30, rows=16)
    assert "left" not in progress._status_text()
    run.done_count, run.last_answer_seconds, run.seconds = 12, 9.0, 9.0
    assert progress._status_text().endswith(" · 18 s left")


def test_an_engine_that_has_ended_ends_the_progress_and_not_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(batch_command, "LOG_SECONDS", 0.01)

    class Ended:
        asked = 0

        def stats(self) -> None:
            self.asked += 1
            raise EngineClosed("the engine is closed")

    raised: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    engine: Any = Ended()
    with BatchStatusLine(engine, run_of(engine, []), total=1, live=True):
        assert soon(lambda: engine.asked)
        time.sleep(0.2)  # and not once more
    assert engine.asked == 1 and raised == [] and capsys.readouterr().err == ""


# `cortexmlx batch` on a real engine, killed at any moment: with --resume each request is answered once, as if nothing
# had happened.


BATCH = [sys.executable, "-c", "from cortexmlx.cli import main; main()", "batch"]
KILLED = """
import os, signal, sys, threading
from cortexmlx.cli import main
from cortexmlx.cli.batch.files import RecordFile
left, delay = int(sys.argv.pop(1)), float(sys.argv.pop(1))
append = RecordFile.append
def counted(file, record):
    global left
    append(file, record)
    left -= 1
    if not left:
        threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
RecordFile.append = counted
main()
"""
"""The command, which ends without a word so many seconds after so many records."""
OPTIONS = ["--raw", "--max-tokens", "12", "--no-kv-store", "--kv-memory", "4MB", "--max-rows", "8"]


def write_requests(path: Path, count: int) -> None:
    """Requests of every style, long and short, and lines that are none."""
    chance = random.Random(7)
    lines = []
    for i in range(count):
        text = f"request {i} " * chance.randint(1, 6)
        body = {"prompt": text, "max_tokens": chance.randint(1, 30)}
        line: Any = {"id": f"r{i}", **body}
        if i % 5 == 1:
            line = {"custom_id": f"r{i}", "method": "POST", "url": "/v1/completions", "body": body}
        elif i % 50 == 2:
            line = {"id": f"r{i}", "prompt": text, "no_such_field": 1}
        lines.append("{oops" if i % 50 == 3 else json.dumps(line))
    path.write_text("\n".join(lines))


def without_moment(path: Path) -> bytes:
    """The file, but for the moment at which its run began."""
    return re.sub(rb'"created": \d+', b'"created": 0', path.read_bytes())


@pytest.mark.slow
def test_a_run_that_is_killed_again_and_again_ends_with_the_same_bytes(tiny: Any, tmp_path: Path) -> None:
    count, kills = 500, 10
    source, whole, out = (tmp_path / name for name in ("in.jsonl", "whole.jsonl", "out.jsonl"))
    write_requests(source, count)
    command = [*BATCH, str(tiny("llama")), str(source), *OPTIONS, "-o"]
    uninterrupted = subprocess.run([*command, str(whole)], capture_output=True)
    assert uninterrupted.returncode == 1, uninterrupted.stderr
    chance = random.Random(kills)
    held = 0
    for left in range(kills, 0, -1):
        more, delay = chance.randint(1, (count - held) // (left + 1)), chance.uniform(0.0, 0.02)
        killed = [*BATCH[:2], KILLED, str(more), str(delay), *command[3:], str(out), "--resume"]
        assert subprocess.run(killed, stderr=subprocess.DEVNULL).returncode == -signal.SIGKILL
        finished = out.read_bytes().count(b"\n")
        assert finished >= held + more, "what had finished is there"
        held = finished
    last = subprocess.run([*command, str(out), "--resume"], capture_output=True)
    assert last.returncode == 1 and f"{held} were there already".encode() in last.stderr, last.stderr
    records = [json.loads(line) for line in out.read_bytes().splitlines()]
    lines = [None if i % 50 == 3 else f"r{i}" for i in range(count)]
    assert [record.get("custom_id", record["id"]) for record in records] == lines
    assert without_moment(out) == without_moment(whole)
    simple = [i for i, record in enumerate(records) if "text" in record]
    assert len(simple) > count // 2
    one, other = (path.read_bytes().splitlines() for path in (out, whole))
    assert [one[i] for i in simple] == [other[i] for i in simple]
