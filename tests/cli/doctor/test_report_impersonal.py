"""Nothing in a report says who and where its user is."""

from __future__ import annotations

import getpass
import platform
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortexmlx.cli.doctor import report
from cortexmlx.cli.doctor.report import Anonymizer, safe_environment


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
