"""The file of `cortexmlx doctor --report`: what is in it, and that it replaces nothing."""

from __future__ import annotations

import getpass
import json
import os
import platform
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortexmlx.cli.doctor import checks, report, trial
from cortexmlx.cli.doctor.report import Anonymizer, CheckStatus, DoctorCheck, safe_environment
from cortexmlx.cli.start import run

FINE = DoctorCheck("fine", CheckStatus.OK, "as it should be")
WRITES = DoctorCheck("KV cache", CheckStatus.OK, "in place")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A doctor with one check and no engine, in a folder of its own."""
    monkeypatch.setattr(checks, "CHECKS", {"a": lambda: iter([FINE])})
    monkeypatch.setattr(trial, "run_trial", lambda begins: ({"stats": {"steps": 3}}, [WRITES]))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_report_has_the_checks_the_machine_and_the_trial_and_says_where_it_is(
    quick: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["doctor", "--report"]) == 0
    out, err = capsys.readouterr()
    assert out == "ok    fine          as it should be\nok    KV cache      in place\n"
    text = (quick / "cortexmlx-report.json").read_text()
    assert f"wrote cortexmlx-report.json ({len(text):,} bytes)" in " ".join(err.split())
    found = json.loads(text)
    assert found["report"] == report.FORMAT and found["stats"] == {"steps": 3}
    assert found["gpu"]["trusted"] is False
    assert found["checks"] == [
        {"name": "fine", "verdict": "ok", "detail": "as it should be", "advice": "", "message": ""},
        {"name": "KV cache", "verdict": "ok", "detail": "in place", "advice": "", "message": ""},
    ]
    assert {"chip", "memory", "mlx", "mlx_lm", "python", "system"} <= found["machine"].keys()


def test_a_model_that_cannot_be_timed_is_told_in_the_report_without_its_name(
    quick: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["doctor", "--report", "--time", "./secret-model"]) == 1
    text = (quick / "cortexmlx-report.json").read_text()
    [choice] = [check for check in json.loads(text)["checks"] if check["name"] == "choice"]
    assert choice["verdict"] == "fail" and choice["detail"].startswith("ModelNotFound: no model 'MODEL'")
    assert "secret-model" not in text
    assert "without its times" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["--report", "--json"], ["--json", "--report"], ["--report=x.json", "--json"]])
def test_json_goes_to_stdout_and_the_report_to_its_file(
    arguments: list[str], quick: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["doctor", *arguments]) == 0
    assert [check["name"] for check in json.loads(capsys.readouterr().out)] == ["fine", "KV cache"]
    assert [path.name for path in quick.iterdir()] == [
        "x.json" if "x.json" in arguments[0] else "cortexmlx-report.json"
    ]


def test_a_file_that_exists_is_kept_and_nothing_is_measured(
    quick: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(trial, "run_trial", None)
    monkeypatch.setattr(checks, "CHECKS", None)
    (quick / "mine.json").write_text("mine")
    assert run(["doctor", "--report", "mine.json"]) == 1
    assert (quick / "mine.json").read_text() == "mine"
    out, err = capsys.readouterr()
    assert not out and "mine.json exists" in err and "remove it, or name another" in " ".join(err.split())


@pytest.mark.parametrize("where", ["no/such/folder.json", "."])
def test_a_path_that_cannot_be_written_is_one_message_before_anything_is_measured(
    where: str, quick: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(checks, "CHECKS", None)
    assert run(["doctor", "--report", where]) == 1
    out, err = capsys.readouterr()
    assert not out and err.startswith("error: ") and where in err and "Traceback" not in err
    assert not list(quick.iterdir())


def test_no_section_names_a_place(quick: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"stats": {"error": f"OSError: no file {Path.home() / 'diary.txt'}"}}
    advised = DoctorCheck("KV cache", CheckStatus.WARN, f"in {quick}", f"look at {quick / 'x'}", f"{quick}: a message")
    monkeypatch.setattr(trial, "run_trial", lambda begins: (found, [advised]))
    assert run(["doctor", "--report"]) == 0
    told = json.loads((quick / "cortexmlx-report.json").read_text())
    assert told["stats"] == {"error": "OSError: no file <path>"}
    assert told["checks"][1] == {
        "name": "KV cache",
        "verdict": "warn",
        "detail": "in <path>",
        "advice": "look at <path>",
        "message": "<path>: a message",
    }


def test_a_machine_that_cannot_be_described_is_no_obstacle(quick: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cortexmlx.bench.measure.machine", None)
    assert run(["doctor", "--report"]) == 0
    told = json.loads((quick / "cortexmlx-report.json").read_text())
    assert told["machine"]["error"].startswith("ModuleNotFoundError: ") and told["checks"]


def test_a_home_is_expanded(quick: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(quick))
    assert run(["doctor", "--report=~/here.json"]) == 0
    assert (quick / "here.json").exists()


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_an_interrupt_or_a_full_disk_leaves_no_file(
    error: BaseException, quick: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(trial, "run_trial", fails)
    assert run(["doctor", "--report"]) in (1, 130)
    assert not list(quick.iterdir())

    class Full:
        def __enter__(self) -> Full:
            return self

        write = __exit__ = fails

    real = Path.open

    def opened(path: Path, *arguments: Any, **options: Any) -> Any:
        real(path, *arguments, **options).close()
        return Full()

    monkeypatch.setattr(Path, "open", opened)
    with pytest.raises(type(error)):
        report.write_file(quick / "full.json", {})
    assert not list(quick.iterdir())


def test_a_file_that_appears_meanwhile_is_kept(quick: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "run_trial", lambda begins: (quick / "r.json").write_text("other") and ({}, []))
    assert run(["doctor", "--report", "r.json"]) == 1
    assert (quick / "r.json").read_text() == "other"


def test_the_whole_report_of_this_machine_names_nobody_and_no_place(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """All checks, and a real engine with a tiny random model."""
    monkeypatch.setattr(import_module("cortexmlx.models.resolve"), "starter_path", lambda: None)
    monkeypatch.setattr(trial, "PROMPT", 8)
    monkeypatch.setattr(trial, "RUNS_PER_SIDE", 1)
    monkeypatch.setattr(trial, "IDLE_SECONDS", 0.001)
    monkeypatch.setattr(trial, "IDLE_BYTES", 4096)
    monkeypatch.setattr(platform, "node", lambda: "adas-machine.example")
    monkeypatch.setattr(getpass, "getuser", lambda: "adalov")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "ada" / "models"))
    file = tmp_path / "report.json"
    assert run(["doctor", "--report", str(file)]) == 0
    text = file.read_text()
    places = {str(Path.home()), str(tmp_path), os.path.realpath(tmp_path), str(Path.cwd()), "/tmp", "/Users/", "/home/"}
    for personal in ("adalov", "adas-machine", *(place for place in places if len(place) > 1)):
        assert personal not in text
    found = json.loads(text)
    [ours], [theirs] = (
        found["a short decode beside mlx-lm"][f"{side}_tokens_per_second"] for side in ("cortexmlx", "mlx_lm")
    )
    assert ours > 0 and theirs > 0 and found["a short decode beside mlx-lm"]["same_tokens"] == [True]
    assert found["model"]["name"] == "random-llama-8M"
    assert found["stats"]["generated_tokens"] == 2 * trial.TOKENS
    assert found["stats"]["arena_writes"]["copied"] == 0
    assert found["speeds"] == [], "only of an Apple GPU"
    idle = found["memory after a pause"]
    assert idle["bytes"] == 4096 and len(idle["busy_seconds"]) == len(idle["after_idle_seconds"]) == 1
    assert not {"requests", "sequences", "timeline"} & found["stats"].keys()


# -- Nothing in a report says who and where its user is ---------------------------------------------------------------


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Anonymizer:
    monkeypatch.setattr(platform, "node", lambda: "Ada-Laptop.local")
    monkeypatch.setattr(getpass, "getuser", lambda: "adal")
    monkeypatch.setattr("pwd.getpwuid", lambda uid: SimpleNamespace(pw_gecos="Ada Lovelace,,,"))
    monkeypatch.setattr(Path, "home", lambda: Path("/Users/adal"))
    monkeypatch.setenv("HF_HOME", "/Volumes/Ada's disk/models")
    return Anonymizer()


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("50 GiB free in /Users/adal/.cache/hub", "50 GiB free in <path>"),
        ("not in /Volumes/Ada's disk/models/hub: set it", "not in <path> set it"),
        ("/opt/secret/place/file.metal:3:4: error", "<path>:3:4: error"),
        ("~/notes/diary.txt, 'C:\\Users\\adal\\x'", "<path>, '<path>'"),
        ("[Errno 2] none: '/Volumes/Big Disk/a b/c.json'", "[Errno 2] none: '<path>'"),
        ("[Errno 2] none: \"/Volumes/Ann's Disk/a b\", '/x y'", "[Errno 2] none: \"<path>\", '<path>'"),
        ("expected '/' or '\\0'", "expected '/' or '\\0'"),
        (
            "Ada-Laptop.local and ADA-LAPTOP of Ada Lovelace, LOVELACE, adal",
            "<name> and <name> of <name>, <name>, <name>",
        ),
        ("a canada adalbert 3/4, tok/s, ~/x", "a canada adalbert 3/4, tok/s, ~/x"),
        ("program_source:412:14: error: use of 'x'", "program_source:412:14: error: use of 'x'"),
    ],
)
def test_names_and_paths_are_taken_out_and_nothing_else(names: Anonymizer, text: str, left: str) -> None:
    assert names.anonymize_text(text) == left


def test_a_user_without_a_home_and_a_folder_that_is_gone_are_no_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> Path:
        raise RuntimeError("Could not determine home directory.")

    def gone() -> Path:
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(Path, "home", none)
    monkeypatch.setattr(Path, "cwd", gone)
    assert Anonymizer().anonymize_text("in /opt/secret/place") == "in <path>"


def test_data_keeps_its_shape_its_numbers_and_its_keys(names: Anonymizer) -> None:
    data = {"adal": [1, 2.5, None, True, "adal"], "b": ({"c": Path("/Users/adal/x")},)}
    assert names.anonymize_data(data) == {"adal": [1, 2.5, None, True, "<name>"], "b": [{"c": "<path>"}]}


@given(
    st.lists(st.sampled_from(["adal", "/Users/adal", "Lovelace", "Ada-Laptop", ":", " ", "/", "x", "'"]), max_size=12)
)
def test_whatever_stands_around_them_names_that_are_words_are_gone(parts: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patched:
        text = names.__wrapped__(patched).anonymize_text(" ".join(parts))  # type: ignore[attr-defined]
    for name in ("adal", "Lovelace", "Ada-Laptop"):
        assert name not in text


def test_a_user_without_a_name_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(*_: object) -> str:
        raise KeyError("getpwuid(): uid not found: 1234")

    monkeypatch.setattr(getpass, "getuser", nobody)
    monkeypatch.setattr(platform, "node", lambda: "")
    monkeypatch.delenv("USER", raising=False)
    assert Anonymizer().anonymize_text("fine") == "fine"


def test_of_the_environment_only_plain_values_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(report.os.environ):
        if name.startswith(("MLX_", "CORTEXMLX_", "OPENBLAS_", "OMP_", "METAL_", "MTL_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("MLX_MAX_OPS_PER_BUFFER", "100")
    monkeypatch.setenv("CORTEXMLX_API_KEY", "s3cret")
    monkeypatch.setenv("CORTEXMLX_KV_STORE", "/Users/adal/kv")
    monkeypatch.setenv("EDITOR", "vi")
    told = {"MLX_MAX_OPS_PER_BUFFER": "100", "CORTEXMLX_API_KEY": "<set>", "CORTEXMLX_KV_STORE": "<set>"}
    assert safe_environment() == told
