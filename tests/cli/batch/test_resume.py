"""`cortexmlx batch --resume`: an interrupted run goes on where it was, and never mixes two kinds of answers."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cortexmlx.cli.batch.resume import BatchRunFile, RunIdentity
from cortexmlx.cli.start import run
from cortexmlx.types.sampling_params import SamplingParams
from support.cli.cli_fakes import Fakes

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


def test_a_run_whose_input_the_shell_pipes_in_goes_on(
    files: tuple[Path, Path], fakes: Fakes, capsys: pytest.CaptureFixture[str]
) -> None:
    for options in ([], ["--resume"]):
        reading, writing = os.pipe()  # what `batch <(jq ...)` hands over is another one each time
        os.write(writing, files[0].read_bytes())
        os.close(writing)
        assert batch((Path(f"/dev/fd/{reading}"), files[1]), *options) == 1
        os.close(reading)
    assert "4 were there already" in capsys.readouterr().err


def test_a_line_that_has_changed_since_its_answer_was_written_is_refused(
    files: tuple[Path, Path], fakes: Fakes, capsys: pytest.CaptureFixture[str]
) -> None:
    batch(files)
    before, requests = files[1].read_bytes(), files[0].read_text()
    files[0].write_text(requests.replace('"a"', '"c"').replace('"b"', '"c"'))
    for options in (["--resume"], ["--resume", "--retry-errors"]):
        assert batch(files, *options) == 1 and files[1].read_bytes() == before
        assert 'the requests named "q0" and 1 more said before' in capsys.readouterr().err
        assert len(fakes.opened) == 1, "before anything is loaded"
    assert batch(files, "--force") == 1 and [r["text"] for r in records(files[1])[:2]] == ["You said: c"] * 2


def test_what_is_no_record_is_refused_before_anything_is_loaded(
    files: tuple[Path, Path], fakes: Fakes, capsys: pytest.CaptureFixture[str]
) -> None:
    batch(files)
    with files[1].open("a") as out:
        out.write("my notes\n{}\n")
    before = files[1].read_bytes()
    assert batch(files, "--resume") == 1 and len(fakes.opened) == 1 and files[1].read_bytes() == before
    said = " ".join(capsys.readouterr().err.split())
    assert "line 5 of " in said and "out.jsonl is no record of a batch: --force starts again" in said


def test_errors_stay_when_a_run_that_asks_them_again_does_not_get_that_far(
    files: tuple[Path, Path], fakes: Fakes, capsys: pytest.CaptureFixture[str]
) -> None:
    """Other weights under the same name are another model."""
    batch(files)
    with files[1].open("a") as out:
        out.write('{"id": "torn')
    before = files[1].read_bytes()
    fakes.info = replace(fakes.info, identity="other")  # found out when the model is loaded
    assert batch(files, "--resume", "--retry-errors") == 1 and files[1].read_bytes() == before
    assert "out.jsonl was written with other settings (weights)" in capsys.readouterr().err


def test_lines_that_were_not_answered_may_change_and_new_ones_come(files: tuple[Path, Path], fakes: Fakes) -> None:
    batch(files)
    files[0].write_text(files[0].read_text().replace("!fail", "c") + '{"id": "q4", "prompt": "e"}\r\n')
    assert batch(files, "--resume", "--retry-errors") == 0
    assert asked(fakes) == ["c", "e"] and [record["id"] for record in records(files[1])] == [f"q{i}" for i in range(5)]
    run_file = files[1].with_name("out.jsonl.run")
    run_file.write_bytes(run_file.read_bytes() + b'{"lines": {"torn')
    assert batch(files, "--resume") == 0 and len(fakes.opened) == 2
    files[0].write_text(files[0].read_text().replace('"c"', '"d"'))
    assert batch(files, "--resume") == 1


def test_a_line_that_failed_and_was_mended_is_told_how_to_be_asked(
    files: tuple[Path, Path], fakes: Fakes, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not to lose all answers, as --force would."""
    batch(files)
    requests = files[0].read_text()
    files[0].write_text(requests.replace("!fail", "c"))
    assert batch(files, "--resume") == 1 and len(fakes.opened) == 1
    said = capsys.readouterr().err
    assert '"q2" failed' in said and "--resume --retry-errors" in said and "--force" not in said
    files[0].write_text(requests.replace("!fail", "c").replace('"a"', '"e"'))
    assert batch(files, "--resume") == 1
    assert 'the requests named "q0" said before' in capsys.readouterr().err, "what was answered comes first"


def test_functions_are_no_part_of_what_a_run_was() -> None:
    params = IDENTITY.as_json()["params"]
    assert "temperature" in params and "logits_processors" not in params


def test_a_finished_run_asks_nothing_and_its_errors_are_still_failures(
    files: tuple[Path, Path], fakes: Fakes, capsys: pytest.CaptureFixture[str]
) -> None:
    batch(files)
    before = files[1].read_bytes()
    capsys.readouterr()
    assert batch(files, "--resume") == 1
    assert len(fakes.opened) == 1, "nor is a model loaded"
    assert files[1].read_bytes() == before
    assert "4 were there already, 1 of them errors: --retry-errors asks them again\n" in capsys.readouterr().err


def test_errors_are_asked_again_and_where_the_last_run_says(
    files: tuple[Path, Path], fakes: Fakes, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = (files[1].with_name(name) for name in ("first", "second"))
    for options in ([], ["--resume"]):
        assert batch(files, "--errors", str(first), *options) == 1 and len(fakes.opened) == 1
        assert [[r["id"] for r in records(path)] for path in (files[1], first)] == [["q0", "q1", "q3"], ["q2"]]
    for place, options in ((files[1], []), (second, ["--errors", str(second)])):
        assert batch(files, "--resume", *options) == 1 and asked(fakes) == ["!fail"]
        assert f"{first} has records of 1 request that failed: it is asked again" in capsys.readouterr().err
        assert [path for path in (files[1], second) if path.exists() and '"q2"' in path.read_text()] == [place]
        assert batch(files, "--resume", *options) == 1 and "asked again" not in capsys.readouterr().err
    files[0].write_text(files[0].read_text().replace("!fail", "c"))
    assert batch(files, "--resume", "--retry-errors", "--errors", str(second)) == 0
    assert asked(fakes) == ["c"] and [record["id"] for record in records(files[1])] == ["q0", "q1", "q2", "q3"]
    assert batch(files, "--resume", "--errors", str(first)) == 0 and first.read_text() == "", "it was answered since"


def test_an_input_that_was_moved_goes_on_and_another_one_does_not(
    files: tuple[Path, Path], fakes: Fakes, capsys: pytest.CaptureFixture[str]
) -> None:
    batch(files)
    moved = files[0].rename(files[0].with_name("moved.jsonl"))
    moved.write_text(moved.read_text() + '{"id": "q4", "prompt": "e"}\n')
    assert batch((moved, files[1]), "--resume") == 1 and asked(fakes) == ["e"]
    moved.write_text('{"id": "other", "prompt": "e"}\n')
    assert batch((moved, files[1]), "--resume") == 1 and len(records(files[1])) == 5
    said = f'out.jsonl holds what {files[0]} asked, and {moved} lacks the requests named "q0" and 4 more: give '
    assert said in capsys.readouterr().err


def test_an_output_that_is_there_is_refused_unless_it_is_said_what_becomes_of_it(
    files: tuple[Path, Path], fakes: Fakes, capsys: pytest.CaptureFixture[str]
) -> None:
    batch(files)
    before = files[1].read_bytes()
    capsys.readouterr()
    assert batch(files) == 1
    said = f"error: {files[1]} exists already: --resume continues it, --force starts again and deletes what it holds"
    assert said in capsys.readouterr().err
    assert files[1].read_bytes() == before and len(fakes.opened) == 1
    assert batch(files, "--force", "--max-tokens", "1") == 1
    assert [record.get("text") for record in records(files[1])] == ["You", "You", None, "You"]
    assert batch(files, "--resume", "--max-tokens", "1") == 1 and len(fakes.opened) == 2


def test_records_that_finished_in_another_order_are_put_into_that_of_the_input(
    files: tuple[Path, Path], fakes: Fakes
) -> None:
    """As after a kill: what had finished is in the file, in any order, with half a line."""
    assert batch(files) == 1
    whole = files[1].read_bytes()
    lines = whole.splitlines(keepends=True)
    files[1].write_bytes(lines[3] + lines[1] + lines[2][:9])
    assert batch(files, "--resume", "--unordered") == 1 and asked(fakes) == ["a", "!fail"]
    assert sorted(files[1].read_bytes().splitlines(keepends=True)) == sorted(lines)
    assert batch(files, "--resume") == 1 and len(fakes.opened) == 2
    assert files[1].read_bytes() == whole


def test_one_run_at_a_time_writes_a_file(
    files: tuple[Path, Path], fakes: Fakes, capsys: pytest.CaptureFixture[str]
) -> None:
    other = BatchRunFile(files[1])
    assert batch(files) == 1 and not files[1].exists()
    assert f"another batch is writing {files[1]}: wait for it" in capsys.readouterr().err
    other.close()
    assert batch(files, "--resume") == 1 and len(records(files[1])) == 4, "without an output, it begins"


def test_a_run_that_goes_on_keeps_the_moment_in_which_it_began(files: tuple[Path, Path], fakes: Fakes) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}]}
    files[0].write_text(
        "".join(json.dumps({"custom_id": i, "url": "/v1/chat/completions", "body": body}) + "\n" for i in "ab")
    )
    assert batch(files) == 0
    first = files[1].read_bytes().splitlines(keepends=True)[0]
    run_file = files[1].with_name("out.jsonl.run")
    run_file.write_text(json.dumps({**json.loads(run_file.read_text().splitlines()[0]), "created": 5}))
    files[1].write_bytes(first)
    assert batch(files, "--resume") == 0
    assert [record["response"]["body"]["created"] for record in records(files[1])][1] == 5


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (["--max-tokens", "3", "--seed", "1"], "max_tokens was 256, now 3; seed was none, now 1"),
        (["--system", "Be brief."], 'system was none, now "Be brief."'),
        (["--raw"], "raw was false, now true"),
        (["--keep-last", "100"], 'keep was none, now {"first": 4, "last": 100}'),
        (["--adapter", "/tuned"], 'adapter was none, now "/tuned"'),
        (["--kv-bits", "4"], "kv_bits was none, now 4"),
        (["--no-think"], 'template_vars was none, now {"enable_thinking": false}'),
    ],
)
def test_another_kind_of_run_is_refused_with_what_differs(
    options: list[str], what: str, files: tuple[Path, Path], fakes: Fakes, capsys: pytest.CaptureFixture[str]
) -> None:
    batch(files)
    before = files[1].read_bytes()
    capsys.readouterr()
    assert batch(files, "--resume", *options) == 1
    said = f"error: out.jsonl was written with other settings ({what}): use the same, or --force to begin again\n"
    assert capsys.readouterr().err.endswith(said)
    assert files[1].read_bytes() == before and len(fakes.opened) == 1, "before anything is loaded"


def test_an_output_of_unknown_origin_is_refused(
    files: tuple[Path, Path], fakes: Fakes, capsys: pytest.CaptureFixture[str]
) -> None:
    files[1].write_text('{"id": "q0"}\n')
    assert batch(files, "--resume") == 1
    assert "out.jsonl.run is missing, so it is not known what out.jsonl holds" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--resume"], "value: --resume needs -o OUT\n"),
        (["-o", "out", "--retry-errors"], "value: --retry-errors needs --resume\n"),
        (["--retry-errors"], "value: --retry-errors needs --resume and -o OUT\n"),
        (["-o", "out", "--resume", "--force"], "give one of them"),
        (["--raw", "--system", "s"], "--raw leaves out"),
    ],
)
def test_options_that_do_not_go_together_are_wrong_usage(
    options: list[str], says: str, files: tuple[Path, Path], fakes: Fakes, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["batch", "fake", str(files[0]), *options]) == 2 and says in capsys.readouterr().err


def test_resume_may_stand_anywhere_on_the_line(fakes: Fakes, tmp_path: Path) -> None:
    (tmp_path / "in").write_text("a\nb\n")
    line = ["batch", "fake", str(tmp_path / "in"), "-o", str(tmp_path / "out")]
    assert run(line) == 0
    answers = (tmp_path / "out").read_bytes()
    for place in (1, 2, 3, 5):  # not between -o and its value
        assert run([*line[:place], "--resume", "--retry-errors", *line[place:]]) == 0, place
        assert (tmp_path / "out").read_bytes() == answers


def in_another_version(output: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """The run as another version of the program has written it down."""
    path = output.with_name(output.name + ".run")
    first, *lines = path.read_text().splitlines(keepends=True)
    run_before = json.loads(first)
    change(run_before)
    path.write_text("".join([json.dumps(run_before) + "\n", *lines]))


@pytest.mark.parametrize("name", ["min_p", "stop", "logit_bias"])
def test_a_setting_that_an_older_version_did_not_know_had_its_default(
    files: tuple[Path, Path], fakes: Fakes, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    batch(files)
    in_another_version(files[1], lambda before: (before["params"].pop(name), before.pop("defaults")))
    assert batch(files, "--resume") == 1 and "4 were there already" in capsys.readouterr().err
    if name == "min_p":
        assert batch(files, "--resume", "--min-p", "0.1") == 1
        assert "was written with other settings (min_p was 0.0, now 0.1)" in capsys.readouterr().err


def test_an_option_that_an_older_version_did_not_know_was_not_given(
    files: tuple[Path, Path], fakes: Fakes, capsys: pytest.CaptureFixture[str]
) -> None:
    batch(files)
    for name in ("adapter", "kv_bits", "keep", "template_vars"):
        in_another_version(files[1], lambda before, name=name: before.pop(name))  # type: ignore[misc]
        assert batch(files, "--resume") == 1 and "4 were there already" in capsys.readouterr().err, name


def test_a_setting_of_a_newer_version_may_have_its_default(
    files: tuple[Path, Path], fakes: Fakes, capsys: pytest.CaptureFixture[str]
) -> None:
    batch(files)

    def newer(before: dict[str, Any]) -> None:
        before["params"]["not_yet_invented"] = before["defaults"]["not_yet_invented"] = -1.0
        before["draft_model"] = None

    in_another_version(files[1], newer)
    assert batch(files, "--resume") == 1 and "4 were there already" in capsys.readouterr().err
    in_another_version(files[1], lambda before: before["params"].update(not_yet_invented=2.0))
    assert batch(files, "--resume") == 1
    assert "was written with other settings (not_yet_invented was 2.0, now -1.0)" in capsys.readouterr().err
    in_another_version(files[1], lambda before: before.update(draft_model="small"))
    assert batch(files, "--resume") == 1
    assert (
        'was written with other settings (draft_model was "small", now none; not_yet_invented was 2.0, now -1.0)'
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    "damage", [{"params": None}, {"params": "x"}, {"defaults": []}, {"created": "9" * 5000}, {"created": 1e400}]
)
def test_a_run_file_whose_settings_are_none_is_no_run_file(
    files: tuple[Path, Path], fakes: Fakes, damage: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    batch(files)
    before = files[1].read_bytes()
    in_another_version(files[1], lambda run_before: run_before.update(damage))
    assert batch(files, "--resume") == 1 and files[1].read_bytes() == before
    assert "it is not known what out.jsonl holds" in capsys.readouterr().err
